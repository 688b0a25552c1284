"""MPI, loaded when it is first used.

Importing ``mpi4py.MPI`` initialises MPI. Importing this package must not do so: a script may set ``mpi4py.rc`` first, a
program that is started by a rank is not a rank itself, and a machine may have no MPI library. So every module here
imports ``MPI`` from this one.
"""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI
else:

    class _LazyMPI(types.ModuleType):
        """Acts as ``mpi4py.MPI``, which is imported when one of its names is first used."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(_load(), name)
            if name.isupper():  # constants, used in every step
                self.__dict__[name] = value
            return value

    def _load() -> types.ModuleType:
        module = sys.modules.get("mpi4py.MPI")
        if module is None:
            from mn_comm.basis.guard import guard

            _let_ucx_forget()
            with guard().initializing():
                from mpi4py import MPI as module
        elif getattr(module.__spec__, "_initializing", False):  # another thread is importing it: wait until it has
            import mpi4py.MPI  # noqa: F401
        return module

    MPI = _LazyMPI("mpi4py.MPI")

__all__ = ["MPI", "has_been_finalized"]


def has_been_finalized() -> bool:
    """Return whether MPI has been finalised, so that no other rank waits for this one; this does not load MPI."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_finalized())


def _let_ucx_forget() -> None:
    """In a job on one host that MPICH's mpiexec has started, let UCX not record what is returned to the system.

    UCX, which MPICH's wheel contains, records 150 bytes for each range of memory, in case a network card uses it, and
    forgets them only when it registers memory with a network card, so never in such a job.
    """
    on_this_host = os.environ.get("MPI_LOCALNRANKS")
    if on_this_host is not None and on_this_host == os.environ.get("PMI_SIZE"):
        os.environ.setdefault("UCX_MEM_EVENTS", "n")
