"""Arrays as bytes, in pieces that every MPI library can count.

Open MPI refuses a count above 2**31-1, whatever the size of an element, so MPI never gets more than one piece at once.
Operations that only move data move bytes, so they work with any dtype, also those that MPI has no name for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis.mpi import MPI

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

PIECE_BYTES = 1 << 30

_Array = np.ndarray[Any, Any]
Messages = Mapping[int, Sequence[Any]]  # arrays by the rank that receives or sends them


def as_bytes(array: _Array) -> _Array:
    """Return a C-contiguous array as a one-dimensional view of its bytes."""
    return array.reshape(-1).view(np.uint8)


def pieces(flat: _Array, nbytes: int | None = None) -> Iterator[_Array]:
    """Cut a one-dimensional array into views of at most ``nbytes`` (default: ``PIECE_BYTES``) each."""
    step = max(1, (nbytes or PIECE_BYTES) // flat.itemsize)
    for begin in range(0, flat.size, step):
        yield flat[begin : begin + step]


def isend(ranks: Ranks, array: _Array, dest: int, tag: int = 0, nbytes: int | None = None) -> list[MPI.Request]:
    """Start sending the elements of a C-contiguous array, which must not change until the requests are done."""
    return [ranks.Isend(piece, dest, tag) for piece in pieces(as_bytes(array), nbytes)]


def irecv(ranks: Ranks, array: _Array, source: int, tag: int = 0) -> list[MPI.Request]:
    """Start receiving into a C-contiguous array the elements that :func:`isend` sends from one of the same size."""
    return [ranks.Irecv(piece, source, tag) for piece in pieces(as_bytes(array))]


def start(ranks: Ranks, outgoing: Messages, incoming: Messages, tag: int = 0) -> list[MPI.Request]:
    """Start sending arrays to some ranks, and receiving arrays from some; as :func:`isend` and :func:`irecv`."""
    requests = [r for other, arrays in incoming.items() for each in arrays for r in irecv(ranks, each, other, tag)]
    requests += [r for other, arrays in outgoing.items() for each in arrays for r in isend(ranks, each, other, tag)]
    return requests


def bcast(ranks: Ranks, array: _Array, root: int) -> None:
    """Overwrite a C-contiguous array on every rank with the root's; collective."""
    for piece in pieces(as_bytes(array)):
        ranks.Bcast(piece, root)
