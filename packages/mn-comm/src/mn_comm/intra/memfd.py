"""Memory that the processes of one node share and nobody else can see.

Each process makes an anonymous file (``memfd_create(2)``), and its neighbours open it through ``/proc``. It has no
name, so nothing is left behind however the processes end; it does not lie in ``/dev/shm``, so the size of that does not
matter; and its pages are reserved when it is made, so that there is an error then, rather than a SIGBUS at first touch.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm import agreement

__all__ = ["share"]

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_TOKEN_BYTES = 16
# Where Python can do without, a mapping does not keep a file descriptor to itself.
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def share(mpi_comm: MPI.Intracomm, nbytes: int) -> list[_Bytes]:
    """Make ``nbytes`` of memory on every rank and let all ranks see all of it; collective.

    Args:
        mpi_comm: The processes, all of one node.
        nbytes: How many bytes each process makes.

    Returns:
        The memory of every rank, by rank, as one-dimensional arrays; it lives until the last array that uses it is
        gone.

    Raises:
        OSError: Memory cannot be made or seen, for instance because the processes run in containers of their own; the
            same on every rank, as ``RuntimeError`` where it is another's.
    """
    token = os.urandom(_TOKEN_BYTES)
    fd = -1
    try:
        with agreement.together(mpi_comm):
            fd = _create(token, nbytes)
        places = mpi_comm.allgather((os.getpid(), fd, token))
        with agreement.together(mpi_comm):
            segments = [_open(place, nbytes) for place in places]
        return segments
    finally:
        if fd >= 0:
            os.close(fd)


def _create(token: bytes, nbytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create(2)")
    fd = os.memfd_create("mn_comm", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, _offset() + nbytes)
        os.pwrite(fd, token, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open(place: tuple[int, int, bytes], nbytes: int) -> _Bytes:
    """Map the memory of a process's file; the token tells it from that of another process of the same number."""
    pid, fd, token = place
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(opened, _TOKEN_BYTES, 0) != token:
            raise OSError(
                f"process {pid} is another one than the neighbour of that number: the two cannot see each other"
            )
        mapped = mmap.mmap(opened, _offset() + nbytes, **_UNTRACKED)
    finally:
        os.close(opened)
    return np.frombuffer(mapped, dtype=np.uint8)[_offset() :]


def _offset() -> int:
    """Return where the memory begins: on the page after the token's."""
    return mmap.PAGESIZE
