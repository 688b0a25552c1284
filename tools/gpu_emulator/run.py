"""Run a command with an emulated GPU: ``python tools/gpu_emulator/run.py ENVIRONMENT COMMAND …``, after build.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def settings(environment: Path) -> dict[str, str]:
    """Return the environment variables for programs in an environment that build.py has changed."""
    emulator = environment.resolve() / "gpu-emulator"
    libraries = str(emulator / "lib")
    before = os.environ.get("LD_LIBRARY_PATH")
    lapack = environment.resolve().glob("lib/python*/site-packages/scipy.libs/libscipy_openblas*.so")
    return {
        "PATH": f"{environment.resolve() / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{libraries}:{before}" if before else libraries,
        "GPU_EMULATOR_LIB": libraries,
        "GPU_EMULATOR_LAPACK": str(next(lapack, "")),
        "PYTEST_PLUGINS": "gpu_emulator.pytest_plugin",
        "CUPY_CACHE_IN_MEMORY": "1",  # the emulator keeps kernels itself
        "CUPY_ACCELERATORS": "",  # without CUB, which is compiled code for GPUs
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    os.environ.update(settings(Path(sys.argv[1])))
    os.execvp(sys.argv[2], sys.argv[2:])
