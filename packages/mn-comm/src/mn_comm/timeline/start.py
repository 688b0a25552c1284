"""The beginning: whether a timeline is kept, and how far this rank's clock is from that of rank 0."""

from __future__ import annotations

import functools
import os
import warnings
from typing import TYPE_CHECKING

from mpi4py import MPI

from mn_comm.timeline import record

if TYPE_CHECKING:
    from mn_comm.timeline.collect import Collector

__all__ = ["join"]

_VARIABLE = "CHAINERMN_TIMELINE"

_collector: Collector | None = None


def join(mpi_comm: MPI.Intracomm) -> None:
    """Keep a timeline from now on, if rank 0 of a communicator is told to; collective.

    Args:
        mpi_comm: The communicator, which is being made.
    """
    # Not each rank by its own environment: Open MPI's launcher hands a variable to the ranks of its own host only.
    file = mpi_comm.bcast(_file() if mpi_comm.rank == 0 else None)
    if file is not None:
        _keep(mpi_comm, file)


@functools.cache
def _file() -> str | None:
    """Return the file for the trace, or warn, once, if it cannot be written."""
    file = os.environ.get(_VARIABLE)
    if not file:
        return None
    folder = os.path.dirname(file) or "."
    writable = os.access(file if os.path.exists(file) else folder, os.W_OK)
    if os.path.isdir(file) or not writable:
        warnings.warn(f"no timeline is kept: {_VARIABLE} is {file}, which cannot be written", stacklevel=2)
        return None
    return os.path.abspath(file)  # the script may change to another folder


def _keep(mpi_comm: MPI.Intracomm, file: str) -> None:
    global _collector
    from mn_comm.timeline.collect import Collector

    if _collector is None:
        record.active = record.Recorder()
        _collector = Collector(record.active, file)
        os.register_at_fork(after_in_child=_forget)
    # The same on all ranks: for all of them it is the first communicator of all ranks, or for none.
    if not _collector.is_aligned and MPI.Comm.Compare(mpi_comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT):
        _collector.align(mpi_comm)


def _forget() -> None:
    """Keep no timeline in a forked process, which is no rank."""
    global _collector
    record.active = _collector = None
