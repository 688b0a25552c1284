"""Faults that the emulator has found: the lines of Python that made them, and all of them for a test to fail on."""

from __future__ import annotations

import atexit
import ctypes
import sys
import traceback

__all__ = ["install", "take"]

_SIZE = 1 << 16
_LIBRARY = "libgpu_emulator.so"
_OWN = ("/cupy/", "/cupy_backends/", "/cupyx/", "site-packages/gpu_emulator/", "/nccl/")


@ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_char), ctypes.c_int, ctypes.c_int)
def _locate(buffer: ctypes.Array[ctypes.c_char], size: int, whole: int) -> None:
    """Write where the calling thread is: the innermost line outside CuPy, or all lines."""
    text = (_all_lines() if whole else _innermost()).encode()[-(size - 2) :]
    ctypes.memmove(buffer, text + b"\n\0", len(text) + 2)


def _all_lines() -> str:
    frames = [each for each in traceback.extract_stack() if _is_outside(each.filename)]
    return "\n".join(f"{_place(each.filename, each.lineno, each.name)}: {each.line}" for each in frames[-8:])


def _innermost() -> str:
    """Return a line without its source, because the emulator asks for it at every call of NCCL."""
    frames = (frame for frame, _ in traceback.walk_stack(None) if _is_outside(frame.f_code.co_filename))
    return next((_place(each.f_code.co_filename, each.f_lineno, each.f_code.co_name) for each in frames), "")


def _is_outside(file: str) -> bool:
    return not any(part in file for part in _OWN)


def _place(file: str, line: int | None, function: str) -> str:
    return f'  File "{file}", line {line}, in {function}'


def install() -> None:
    """Let the library ask for lines of Python, until Python ends."""
    library = ctypes.CDLL(_LIBRARY)
    library.gpu_emulator_locate_by(_locate)
    # The threads of streams may make faults afterwards.
    atexit.register(library.gpu_emulator_locate_by, None)


def take() -> str:
    """Return the faults that were found since the last call, or an empty string."""
    if "cupy" not in sys.modules:
        return ""
    buffer = ctypes.create_string_buffer(_SIZE)
    ctypes.CDLL(_LIBRARY).gpu_emulator_take_faults(buffer, _SIZE)
    return buffer.value.decode(errors="replace")
