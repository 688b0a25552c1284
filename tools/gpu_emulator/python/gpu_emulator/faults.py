"""Faults that the emulator has found: the lines of Python that made them, and all of them for a test to fail on."""

from __future__ import annotations

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
    frames = [each for each in traceback.extract_stack() if not any(part in each.filename for part in _OWN)]
    lines = [f'  File "{each.filename}", line {each.lineno}, in {each.name}: {each.line}' for each in frames]
    text = "\n".join(lines[-8:] if whole else lines[-1:]).encode()[-(size - 2) :]
    ctypes.memmove(buffer, text + b"\n\0", len(text) + 2)


def install() -> None:
    """Let the library ask for lines of Python."""
    ctypes.CDLL(_LIBRARY).gpu_emulator_locate_by(_locate)


def take() -> str:
    """Return the faults that were found since the last call, or an empty string."""
    if "cupy" not in sys.modules:
        return ""
    buffer = ctypes.create_string_buffer(_SIZE)
    ctypes.CDLL(_LIBRARY).gpu_emulator_take_faults(buffer, _SIZE)
    return buffer.value.decode(errors="replace")
