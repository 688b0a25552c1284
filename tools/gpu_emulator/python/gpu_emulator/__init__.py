"""The Python side of the GPU emulator: CuPy calls :func:`install` at the end of its import."""

from __future__ import annotations

from gpu_emulator import compiler, faults, substitutes

__all__ = ["install"]


def install() -> None:
    """Let CuPy compile kernels with g++, and faults be reported with the line of Python."""
    faults.install()
    compiler.install()
    substitutes.install()
