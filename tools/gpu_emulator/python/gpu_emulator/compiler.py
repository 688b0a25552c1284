"""Compiles kernels in CUDA C++ to libraries for the host, with g++; takes the place of NVRTC in CuPy."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["install", "prepare"]

_SHIM = Path(__file__).parent / "shim"
_LIBRARIES = Path(os.environ.get("GPU_EMULATOR_LIB", ""))
# The libraries that were made of kernels, for the next programs.
_CACHE = Path(os.environ.get("GPU_EMULATOR_CACHE") or _LIBRARIES.parent / "kernels")
# Where the sources that NVRTC would have got are kept, if anywhere.
_COLLECTED = os.environ.get("GPU_EMULATOR_KERNELS")
_COMPILER = ["g++", "-w", "-fpermissive", "-O1", "-std=c++17", "-fno-strict-aliasing", "-fPIC", "-mf16c", "-mavx"]
# Each is compiled in advance.
_HEADER, _HEADER_FOR_CUPY = "cuda_on_host.h", "cupy_on_host.h"
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(')
_KERNEL_IN_BLOCK = re.compile(r"__global__\s+void\s+(\w+)\s*\(")
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+([\w :<>]+?)\s+(\w+)\s*\[\s*\]\s*;")
_BARRIERS = ("__syncthreads", "_REDUCE", "__syncwarp", "__shfl", "__ballot")


def prepare() -> None:
    """Compile the headers, for kernels to be compiled fast."""
    for header in (_HEADER, _HEADER_FOR_CUPY):
        source = _SHIM / header
        command = [*_COMPILER, *_includes(), "-x", "c++-header", str(source), "-o", f"{source}.gch"]
        subprocess.run(command, check=True)


def install() -> None:
    """Replace NVRTC in CuPy."""
    from cupy.cuda import compiler

    def compile_for_host(
        source: str,
        options: Sequence[str] = (),
        arch: Any = None,
        filename: str = "kern.cu",
        name_expressions: Sequence[str] | None = None,
        log_stream: Any = None,
        cache_in_memory: bool = False,
        jitify: Any = None,
        method: Any = None,
    ) -> tuple[bytes, dict[str, str] | None]:
        expressions = sorted(name_expressions or ())
        library = _build(source, options, expressions)
        names = {expression: f"fkne{i}" for i, expression in enumerate(expressions)}
        return b"GPU_EMULATOR:" + str(library).encode() + b"\0", names or None

    # The second name is that of CuPy 13.
    names_of_compiler = ("_compile_using_nvrtc_no_warning", "compile_using_nvrtc")
    setattr(compiler, next(name for name in names_of_compiler if hasattr(compiler, name)), compile_for_host)
    # By its output, CuPy's cache tells versions of NVRTC apart.
    compiler._preprocess = lambda *_, **__: "emulated"  # noqa: SLF001


def _build(source: str, options: Sequence[str], expressions: Sequence[str]) -> Path:
    defines = [option for option in options if option.startswith("-D") and "JITIFY" not in option]
    kernel = json.dumps([source, defines, expressions])
    if _COLLECTED:
        _collect(Path(_COLLECTED), kernel, {"source": source, "options": list(options), "names": list(expressions)})
    key = _digest(kernel, _version())
    library = _CACHE / f"{key}.so"
    if library.exists():
        return library
    _CACHE.mkdir(parents=True, exist_ok=True)
    # All ranks need the same kernels at the same time: one compiles, the others wait for it.
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not library.exists():
                _compile(_translate(source, expressions), defines, library)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile keeps the file open
    return library


def _compile(text: str, defines: Sequence[str], library: Path) -> None:
    source, built = library.with_suffix(".cpp"), library.with_suffix(".part")
    source.write_text(text)
    link = ["-shared", str(source), "-o", str(built), f"-L{_LIBRARIES}", "-lgpu_emulator"]
    done = subprocess.run([*_COMPILER, *defines, *_includes(), *link], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise RuntimeError(f"g++ cannot compile {source}: " + "\n".join(errors)[:1500])
    built.rename(library)
    source.unlink()


def _collect(folder: Path, kernel: str, kept: dict[str, Any]) -> None:
    file = folder / f"{_digest(kernel)}.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")  # other ranks may write the same
        own.write_text(json.dumps(kept))
        own.rename(file)


def _includes() -> list[str]:
    spec = importlib.util.find_spec("cupy")
    assert spec is not None
    assert spec.origin is not None
    return [f"-I{_SHIM}", f"-I{Path(spec.origin).parent / '_core' / 'include'}"]


@functools.cache
def _version() -> str:
    """Return what changes if a kernel must be compiled again although its source is the same."""
    import cupy

    headers = (file for file in sorted(_SHIM.rglob("*")) if file.suffix in (".h", ".cuh"))
    return _digest(cupy.__version__, *_COMPILER, *(file.read_text() for file in headers))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:40]


def _translate(source: str, expressions: Sequence[str]) -> str:
    """Return C++ with the kernels, and for each what ``src/kernels.cpp`` looks up."""
    has_barriers = int(any(word in source for word in _BARRIERS))
    names = _KERNEL.findall(source)
    if 'extern "C"' in source and not names:
        names = _KERNEL_IN_BLOCK.findall(source)
    exports = [f"FK_EXPORT({name}, {name}, {has_barriers})" for name in dict.fromkeys(names)]
    for i, expression in enumerate(expressions):
        exports += [f"static auto fkp_{i} = &{expression};", f"FK_EXPORT_POINTER(fkne{i}, fkp_{i}, {has_barriers})"]
    text = _DYNAMIC_SHARED.sub(r"\1* \2 = (\1*)fk_ctx.dyn;", source)
    header = _HEADER_FOR_CUPY if "<cupy/carray.cuh>" in source else _HEADER
    return "\n".join([f'#include "{header}"', text, *exports, ""])
