"""Loads and initialises mpi4py's MPI library in one process, and writes how far it got; runs in its own process."""

from __future__ import annotations

from pathlib import Path

from mn_tools.doctor.commands import emit, errors_as


def main() -> None:
    """Load and initialise MPI; each step is written as soon as it is done, because any step may end the process."""
    with errors_as("error"):
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        vendor, numbers = MPI.get_vendor()
        version = ".".join(map(str, numbers))
        emit(vendor=vendor, version=version, files=loaded(), full=MPI.Get_library_version().split("\n")[0])
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        emit(started=True, threads=MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        MPI.Finalize()


def loaded() -> list[str]:
    """Return the files of the loaded MPI libraries."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return sorted(file for file in files if Path(file).name.startswith(("libmpi.so", "libmpich.so")))


if __name__ == "__main__":
    main()
