"""Whether the MPI library has noticed that it was started by a launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mn_comm.mpi import MPI

__all__ = ["check_launch"]

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Where Open MPI's, MPICH's and Slurm's launchers say how many processes they have started."""
_ALLOWED = "CHAINERMN_ALLOW_SINGLETONS"


def check_launch(size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise if this process is alone although a launcher has started several.

    An MPI library that does not understand its launcher takes each process for a job of its own. All of them would
    then train alone, and write to the same files.

    Args:
        size: How many processes ``MPI_COMM_WORLD`` has.
        environ: The environment.

    Raises:
        RuntimeError: The launcher has started several, ``MPI_COMM_WORLD`` has one, and ``CHAINERMN_ALLOW_SINGLETONS``
            is not set.
    """
    if size != 1 or environ.get(_ALLOWED, "") not in ("", "0"):
        return
    for name in _SIZES:
        started = environ.get(name, "")
        if started.isdecimal() and int(started) > 1:
            library = " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())
            raise RuntimeError(
                f"expected {started} processes in MPI_COMM_WORLD, as the launcher says in {name}, got 1: the launcher "
                f"and the MPI library ({library}) are different implementations. Use the mpiexec that belongs to the "
                f"library; or set {_ALLOWED}=1 if each process is to be on its own"
            )
