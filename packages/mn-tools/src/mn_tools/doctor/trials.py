"""What the doctor tries in a process of its own, because it may end the process, or never end.

The first argument names a function of this module, the others are passed to it. Each step is written as soon as it is
done.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from mn_tools.doctor.commands import emit, errors_as


def import_package(name: str) -> None:
    """Import a package and write its version, or what went wrong."""
    with errors_as("error"):
        module = importlib.import_module(name)
        emit(version=str(getattr(module, "__version__", "0")), file=str(module.__file__))


def start_library() -> None:
    """Load and initialise mpi4py's MPI library, and write how far it got."""
    with errors_as("error"):
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        vendor, numbers = MPI.get_vendor()
        version = ".".join(map(str, numbers))
        emit(vendor=vendor, version=version, files=_loaded(), full=MPI.Get_library_version().split("\n")[0])
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        emit(started=True, threads=MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        MPI.Finalize()


def _loaded() -> list[str]:
    """Return the files of the loaded MPI libraries."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return sorted(file for file in files if Path(file).name.startswith(("libmpi.so", "libmpich.so")))


def find_devices() -> None:
    """Write the versions of CuPy, the driver and NCCL, and the devices."""
    with errors_as("cupy_error"):
        import cupy

        runtime = cupy.cuda.runtime
        emit(cupy=str(cupy.__version__), runtime=int(runtime.runtimeGetVersion()))
        with errors_as("device_error"):
            emit(driver=int(runtime.driverGetVersion()))
            emit(devices=_devices(cupy))
        with errors_as("nccl_error"):
            from mn_comm.device import nccl

            emit(nccl=nccl.get_version())


def _devices(cupy: Any) -> list[tuple[str, str]]:
    runtime = cupy.cuda.runtime
    found = []
    for number in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(number)
        name = properties["name"]
        name = name.decode() if isinstance(name, bytes) else str(name)
        architecture = f"sm_{properties['major']}{properties['minor']}"
        found.append((f"{name} at {cupy.cuda.Device(number).pci_bus_id}", architecture))
    return found


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
