"""Memory that is shared by the ranks of one node only.

One rank creates an anonymous file (``memfd_create(2)``) with a part for each rank; the others open it through
``/proc``. It has no name, so nothing is left behind however the processes end, and is not in ``/dev/shm``, whose size
may be small. Every rank reserves the pages of its part: too little memory is an error at once, rather than a SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_TOKEN_BYTES = 16
# If Python supports it, a mapping does not keep a file descriptor.
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class SharedMemory:
    """Memory of the ranks of one node, for temporary use during averaging, enlarged when more is needed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._parts: list[_Bytes] = []

    def require(self, nbytes: int) -> list[_Bytes]:
        """Return memory of every rank, as :func:`share` does; the same as before if it is large enough."""
        if not self._parts or self._parts[0].nbytes < nbytes:
            self._parts = []  # freed first: the new memory may need it
            self._parts = share(self._ranks, nbytes)
        return self._parts


def share(ranks: Ranks, nbytes: int) -> list[_Bytes]:
    """Return ``nbytes`` of memory of every rank of one node, by rank, all of which all ranks can access; collective.

    It consists of one-dimensional arrays, and lives until the last array that uses it is gone. All ranks raise OSError
    if it cannot be allocated or shared, for example because the ranks run in separate containers or as different users.
    """
    length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    token = os.urandom(_TOKEN_BYTES)
    made = -1
    try:
        with agreement.raise_on_all(ranks):
            if ranks.rank == 0:
                made = _make(token, length * ranks.size)
        place = ranks.bcast((os.getpid(), made, token))
        with agreement.raise_on_all(ranks):
            whole = _open(place, length, ranks)
        return [whole[length * rank :][:nbytes] for rank in range(ranks.size)]
    finally:
        if made >= 0:
            os.close(made)


def _make(token: bytes, nbytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create(2)")
    fd = os.memfd_create("mn_comm", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes + mmap.PAGESIZE)  # the token is on the last page
        os.pwrite(fd, token, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open(place: tuple[int, int, bytes], length: int, ranks: Ranks) -> _Bytes:
    """Map the file; the token distinguishes it from a file of another process with the same process ID."""
    pid, fd, token = place
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(opened, _TOKEN_BYTES, length * ranks.size) != token:
            raise OSError(f"process {pid} is not the expected neighbor: the two processes cannot see each other")
        # Done by the owner, so that the pages are in memory near its core.
        if length:
            os.posix_fallocate(opened, length * ranks.rank, length)
        mapped = mmap.mmap(opened, length * ranks.size + mmap.PAGESIZE, **_UNTRACKED)
    finally:
        os.close(opened)
    return np.frombuffer(mapped, dtype=np.uint8)
