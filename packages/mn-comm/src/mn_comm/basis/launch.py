"""Check that this process is a rank, and that the MPI library recognised the launcher that started it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mn_comm.basis.child_processes import is_worker
from mn_comm.basis.mpi import MPI

_OF_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK")
_OF_MPICH = ("PMI_SIZE", "PMI_RANK", "PMI_FD")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # how many processes a launcher has started
_ALLOWED = "CHAINERMN_ALLOW_SINGLETONS"


def check_initialized() -> None:
    """Raise RuntimeError if MPI is not running in this process: the next call of MPI would end the process.

    This is so in the processes that multiprocessing starts, and after MPI was finalised.
    """
    if MPI.Is_finalized():
        raise RuntimeError("expected MPI to run, but MPI.Finalize() has been called")
    if MPI.Is_initialized():
        return
    if is_worker():
        raise RuntimeError(
            "expected create_communicator to be called by a rank, got a call in a worker process of multiprocessing, "
            'which imports the main script again: put the call under `if __name__ == "__main__":`'
        )
    raise RuntimeError("expected MPI to be initialized, got mpi4py.rc.initialize = False and no call of MPI.Init()")


def check_launch(size: int, library: str | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Raise RuntimeError if this process is alone although another MPI library's launcher has started several.

    An MPI library that does not understand its launcher treats each process as a separate job. All processes would then
    train alone, and write to the same files. ``CHAINERMN_ALLOW_SINGLETONS`` allows this.

    ``size`` is that of ``MPI_COMM_WORLD``, and ``library`` how an MPI library (by default the loaded one) describes
    itself.
    """
    if size != 1 or environ.get(_ALLOWED, "") not in ("", "0"):
        return
    library = library or MPI.Get_library_version()
    its_own = _OF_OPEN_MPI if library.startswith("Open MPI") else _OF_MPICH
    if any(name in environ for name in its_own):
        return  # it has understood these variables; others come from an outer launcher
    for name in _SIZES:
        started = environ.get(name, "")
        if started.isdecimal() and int(started) > 1:
            raise RuntimeError(
                f"expected {started} processes in MPI_COMM_WORLD, as the launcher says in {name}, got 1: the launcher "
                f"and the MPI library ({_short(library)}) are different implementations. {_advice(name, library)}; or "
                f"set {_ALLOWED}=1 if each process is meant to run alone"
            )


def _advice(variable: str, library: str) -> str:
    if not variable.startswith("SLURM"):
        return "Use the mpiexec that belongs to the library"
    return f"Use srun --mpi={'pmix' if library.startswith('Open MPI') else 'pmi2'}, see srun --mpi=list"


def _short(library: str) -> str:
    return " ".join(library.splitlines()[0].split(",")[0].split())
