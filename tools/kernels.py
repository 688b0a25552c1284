"""Compile GPU kernels with NVIDIA's own compiler, NVRTC, for several GPUs; no GPU and no driver are needed.

``python tools/kernels.py FOLDER --arch sm_70,sm_80,sm_90,sm_100`` compiles every kernel in FOLDER for each architecture
and prints a table. FOLDER contains a JSON object for each kernel, with its ``source``, the ``options`` of the compiler
and the ``names`` of its template instances: what a run on the emulated GPU collects. ``--cuda 13`` takes the NVRTC of
CUDA 13.

The compiler and its headers come from NVIDIA's wheels (``nvidia-cuda-nvrtc-cu12`` and ``nvidia-cuda-runtime-cu12``, or
``nvidia-cuda-nvrtc`` and ``nvidia-cuda-runtime`` of CUDA 13), CuPy's headers from its wheel. The exit status is 1 if a
kernel does not compile, or if there is none; the first line of each error is shown.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import ctypes
import functools
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Where NVIDIA's wheels put the compiler and the headers of the runtime.
PLACES = {
    12: ("cuda_nvrtc/lib/libnvrtc.so.12", "cuda_runtime/include"),
    13: ("cu13/lib/libnvrtc.so.13", "cu13/include"),
}
SHOWN = 10  # failures


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel.

    Attributes:
        file: Where it was read.
        arch: For which architecture it was compiled.
        error: The first error, or an empty string.
    """

    file: Path
    arch: str
    error: str


class Compiler:
    """NVRTC of one CUDA.

    Args:
        cuda: 12 or 13.
    """

    def __init__(self, cuda: int) -> None:
        library, headers = PLACES[cuda]
        folders = _folders("nvidia")
        found = [folder / library for folder in folders if (folder / library).exists()]
        if not found:
            raise SystemExit(f"expected {library} of CUDA {cuda} in one of {[str(folder) for folder in folders]}")
        self._nvrtc = ctypes.CDLL(str(found[0]))
        own = [folder / "_core" / "include" for folder in _folders("cupy")]
        own += [folder / headers for folder in folders]
        libraries = [own[0] / "cupy" / "_cccl" / name for name in ("libcudacxx", "thrust", "cub")] if own else []
        self._headers = [f"-I{folder}" for folder in [*libraries, *own] if folder.is_dir()]

    @property
    def version(self) -> str:
        """The version of NVRTC."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: str, options: list[str], names: list[str], arch: str) -> str:
        """Compile one source.

        Args:
            source: CUDA C++.
            options: The compiler's options, without folders of headers.
            names: Expressions that name instances of templates.
            arch: Such as ``sm_90``.

        Returns:
            The compiler's messages if it failed, otherwise an empty string.
        """
        program = ctypes.c_void_p()
        self._nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
        try:
            for name in names:
                self._nvrtc.nvrtcAddNameExpression(program, name.encode())
            every = [option.encode() for option in [*options, *self._headers, f"-arch={arch}"]]
            status = self._nvrtc.nvrtcCompileProgram(program, len(every), (ctypes.c_char_p * len(every))(*every))
            return (self._log(program) or f"status {status}") if status else ""
        finally:
            self._nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _log(self, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._nvrtc.nvrtcGetProgramLog(program, text)
        return text.value.decode(errors="replace")


def _folders(package: str) -> list[Path]:
    """Return the folders of a package, without importing it: CuPy looks for a driver when it is imported."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []


_compiler = functools.cache(Compiler)


def compile_file(work: tuple[int, str, Path]) -> Outcome:
    """Compile one kernel, in a process that keeps its compiler."""
    cuda, arch, file = work
    kernel = json.loads(file.read_text())
    # These folders are those of the environment in which the kernel was collected.
    options = [option for option in kernel["options"] if not option.startswith(("-I", "-arch", "--gpu-arch"))]
    return Outcome(file, arch, first_error(_compiler(cuda).compile(kernel["source"], options, kernel["names"], arch)))


def first_error(log: str) -> str:
    """Return the first error among the compiler's messages; if there is none, the first message."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = (line for line in lines if re.search(r"\berror\b", line))
    return next(errors, lines[0] if lines else "")


def compile_all(files: list[Path], architectures: list[str], cuda: int, processes: int) -> Iterator[Outcome]:
    """Compile every kernel for every architecture."""
    work = [(cuda, arch, file) for arch in architectures for file in files]
    # A compiler with threads of its own must not be forked.
    # NVRTC asks the driver a question that an emulated one does not understand, and crashes.
    os.environ.pop("LD_LIBRARY_PATH", None)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        yield from pool.map(compile_file, work, chunksize=8)


def main() -> int:
    """Compile, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_70,sm_80,sm_90,sm_100", help="separated by commas")
    parser.add_argument("--cuda", type=int, default=12, choices=sorted(PLACES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="compile only one kernel in so many")
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.json"))[:: options.every]
    if not files:
        sys.stderr.write(f"expected kernels in {options.folder}, got none\n")
        return 1
    version = Compiler(options.cuda).version
    start = time.monotonic()
    architectures = options.arch.split(",")
    counts: collections.Counter[str] = collections.Counter()
    failed = []
    for outcome in compile_all(files, architectures, options.cuda, options.processes):
        counts[outcome.arch] += not outcome.error
        failed += [outcome] if outcome.error else []
    sys.stdout.write(f"NVRTC {version}, {len(files)} kernels\n")
    for arch in architectures:
        sys.stdout.write(f"{arch:<8} {counts[arch]} compiled, {len(files) - counts[arch]} failed\n")
    for outcome in failed[:SHOWN]:
        sys.stdout.write(f"{outcome.arch} {outcome.file.name}: {outcome.error}\n")
    sys.stdout.write(f"{time.monotonic() - start:.0f} s\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
