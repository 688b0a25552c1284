"""The beginning of a timeline: whether one is recorded, and the comparison of this rank's clock with that of rank 0."""

from __future__ import annotations

import functools
import os
import warnings

from mpi4py import MPI

from mn_comm.ranks.spans import VARIABLE, record
from mn_tools.timeline.collect import Collector
from mn_tools.timeline.record import Recorder

_collector: Collector | None = None


def join(mpi_comm: MPI.Intracomm, file: str) -> None:
    """Record a timeline from now on; collective.

    Args:
        mpi_comm: The communicator, which is being created.
        file: The file that rank 0 will write.
    """
    global _collector
    # Only rank 0 checks this: other ranks may be on hosts without such a folder.
    can_write = mpi_comm.bcast(_absolute(file) if mpi_comm.rank == 0 else "")
    if _collector is None and can_write:
        recorder = Recorder()
        record(recorder)
        _collector = Collector(recorder, can_write)
        os.register_at_fork(after_in_child=_forget)
    # The same on all ranks: either it is the first communicator of all ranks for each of them, or for none.
    is_of_all = MPI.Comm.Compare(mpi_comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT)
    if _collector is not None and not _collector.is_aligned and is_of_all:
        _collector.align(mpi_comm)


@functools.cache  # one warning is enough
def _absolute(file: str) -> str:
    """Return the absolute path of a file, because the script may change its folder; empty if it cannot be written."""
    folder = os.path.dirname(file) or "."
    # The file is replaced; a folder or a device, such as /dev/null, is not.
    if (os.path.exists(file) and not os.path.isfile(file)) or not os.access(folder, os.W_OK):
        warnings.warn(f"no timeline is recorded: {VARIABLE} is {file}, which cannot be written", stacklevel=2)
        return ""
    return os.path.abspath(file)


def _forget() -> None:
    """Stop recording in a forked process, which is not a rank."""
    global _collector
    record(None)
    _collector = None
