"""Compiles kernels in CUDA C++ to libraries for the host, with g++; takes the place of NVRTC in CuPy."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["install"]

_SHIM = Path(__file__).parent / "shim"
_LIBRARIES = Path(os.environ.get("GPU_EMULATOR_LIB", ""))
# Libraries, and beside each the source that NVRTC would have got.
_KERNELS = Path(os.environ.get("GPU_EMULATOR_KERNELS", _LIBRARIES.parent / "kernels"))
_COMPILER = ["g++", "-w", "-fpermissive", "-O1", "-std=c++17", "-fno-strict-aliasing", "-fPIC", "-shared"]
_TARGET = ["-mf16c", "-mavx"]
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(')
_KERNEL_IN_BLOCK = re.compile(r"__global__\s+void\s+(\w+)\s*\(")
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+([\w :<>]+?)\s+(\w+)\s*\[\s*\]\s*;")
_BARRIERS = ("__syncthreads", "_REDUCE", "__syncwarp", "__shfl", "__ballot")


def install() -> None:
    """Replace NVRTC in CuPy."""
    import cupy
    from cupy.cuda import compiler

    include = Path(cupy.__file__).parent / "_core" / "include"

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
        library = _build(source, options, include, expressions)
        names = {expression: f"fkne{i}" for i, expression in enumerate(expressions)}
        return b"GPU_EMULATOR:" + str(library).encode() + b"\0", names or None

    compiler._compile_using_nvrtc_no_warning = compile_for_host  # noqa: SLF001
    # By its output, CuPy's cache tells versions of NVRTC apart.
    compiler._preprocess = lambda *_, **__: "emulated"  # noqa: SLF001


def _build(source: str, options: Sequence[str], include: Path, expressions: Sequence[str]) -> Path:
    _KERNELS.mkdir(parents=True, exist_ok=True)
    defines = [option for option in options if option.startswith("-D") and "JITIFY" not in option]
    key = hashlib.sha256(json.dumps([source, defines, expressions]).encode()).hexdigest()[:40]
    library = _KERNELS / f"{key}.so"
    if library.exists():
        return library
    kept = {"source": source, "options": list(options), "names": list(expressions)}
    library.with_suffix(".json").write_text(json.dumps(kept))
    own = _KERNELS / f"{key}.{os.getpid()}.cpp"  # other ranks may compile the same kernel
    own.write_text(_translate(source, expressions))
    built = own.with_suffix(".so")
    where = [f"-I{_SHIM}", f"-I{include}", str(own), "-o", str(built), f"-L{_LIBRARIES}", "-lgpu_emulator"]
    done = subprocess.run([*_COMPILER, *_TARGET, *defines, *where], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise RuntimeError(f"g++ cannot compile {own}: " + "\n".join(errors)[:1500])
    built.rename(library)
    own.unlink()
    return library


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
    return "\n".join(['#include "cuda_on_host.h"', text, *exports, ""])
