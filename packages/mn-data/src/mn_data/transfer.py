"""Sending one column of a dataset from the root to the ranks, each of which receives only its own samples.

An array is sent as raw bytes, in pieces, and received directly into its final memory; samples that are not contiguous
are collected piece by piece. Python objects are pickled a few thousand at a time, so that there is never a pickle of
all of them, and the ranks unpickle while the root pickles.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm import raise_on_all
from mn_data.columns import ArrayLayout, Column

if TYPE_CHECKING:
    from mn_comm.building_blocks import Ranks

__all__ = ["recv_array", "recv_objects", "send_array", "send_objects"]

_Array = np.ndarray[Any, Any]
Advance = Callable[[int], object]

_TAG = 23719  # unlikely to be used by scripts, most of which use 0
_GATHER_BYTES = 1 << 24
_NAP = 0.0005  # seconds
_PICKLE_BYTES = 1 << 20
_FIRST_CHUNK = 256
_MOST_AT_ONCE = 1 << 15
_END, _FAILURE = 0, -1


def send_array(
    ranks: Ranks, parts: Sequence[Column], layout: ArrayLayout, max_buf_len: int, advance: Advance
) -> _Array:
    """Send each rank its rows of an array.

    Args:
        ranks: The ranks; this one is the root.
        parts: Each rank's rows.
        layout: The dtype and shape of a row.
        max_buf_len: The maximum number of bytes passed to MPI at once.
        advance: Called with the number of bytes that were moved.

    Returns:
        This rank's rows, in a new array.
    """
    for dest, part in enumerate(parts):
        if dest != ranks.rank:
            for begin, end in _row_pieces(len(part.positions), layout, max_buf_len):
                rows = np.ascontiguousarray(part.select(range(begin, end)).rows())
                for piece in _byte_pieces(rows, max_buf_len):
                    ranks.Send(piece, dest, _TAG)
                    advance(piece.size)
    own = parts[ranks.rank].rows()
    advance(own.nbytes)
    # Copy a view: otherwise the whole array would stay in memory as long as this part of it.
    return np.array(own, copy=True) if own.base is not None else own


def recv_array(ranks: Ranks, length: int, layout: ArrayLayout, max_buf_len: int, root: int, advance: Advance) -> _Array:
    """Receive ``length`` rows that the root sends by :func:`send_array`."""
    received: _Array = np.empty((length, *layout.row_shape), layout.dtype)
    if received.nbytes:
        _wait_idly(ranks, root)
    for begin, end in _row_pieces(length, layout, max_buf_len):
        for piece in _byte_pieces(received[begin:end], max_buf_len):
            ranks.Recv(piece, root, _TAG)
            advance(piece.size)
    return received


def send_objects(ranks: Ranks, parts: Sequence[Column], max_buf_len: int, advance: Advance) -> list[Any]:
    """Send each rank its objects; collective, with :func:`recv_objects` on the other ranks.

    Args:
        ranks: The ranks; this one is the root.
        parts: Each rank's objects.
        max_buf_len: The maximum number of bytes passed to MPI at once.
        advance: Called with the number of bytes that were moved.

    Returns:
        This rank's objects.

    Raises:
        Exception: What pickling raised (on every rank).
    """
    others = [dest for dest in range(ranks.size) if dest != ranks.rank]
    with raise_on_all(ranks):
        verdict = _FAILURE
        try:
            # The ranks in turn, so that each always has something to unpickle.
            in_turn = zip_longest(*(_pickled(parts[dest], dest) for dest in others))
            for dest, pickled in filter(None, chain.from_iterable(in_turn)):
                _send_pickled(ranks, pickled, dest, max_buf_len)
                advance(len(pickled))
            verdict = _END
        finally:
            for dest in others:
                ranks.Send(np.array([verdict], dtype=np.int64), dest, _TAG)
    return list(parts[ranks.rank].rows())


def recv_objects(ranks: Ranks, max_buf_len: int, root: int, advance: Advance) -> list[Any]:
    """Receive the objects that the root sends by :func:`send_objects`; collective, and raises the same exceptions."""
    received: list[Any] = []
    with raise_on_all(ranks):
        try:
            for pickled in _recv_pickled(ranks, max_buf_len, root, advance):
                received.extend(pickle.loads(pickled.data))
        except Exception:
            for _ in _recv_pickled(ranks, max_buf_len, root, advance):
                pass  # the root continues to send
            raise
    return received


def _send_pickled(ranks: Ranks, pickled: bytes, dest: int, max_buf_len: int) -> None:
    ranks.Send(np.array([len(pickled)], dtype=np.int64), dest, _TAG)
    for piece in _byte_pieces(np.frombuffer(pickled, dtype=np.uint8), max_buf_len):
        ranks.Send(piece, dest, _TAG)


def _recv_pickled(ranks: Ranks, max_buf_len: int, root: int, advance: Advance) -> Iterator[_Array]:
    length = np.empty(1, dtype=np.int64)
    while True:
        _wait_idly(ranks, root)
        ranks.Recv(length, root, _TAG)
        if length[0] in (_END, _FAILURE):
            return
        pickled: _Array = np.empty(int(length[0]), dtype=np.uint8)
        for piece in _byte_pieces(pickled, max_buf_len):
            ranks.Recv(piece, root, _TAG)
            advance(piece.size)
        yield pickled


def _wait_idly(ranks: Ranks, root: int) -> None:
    """Wait for the root's next message without keeping a core busy, as MPI would.

    The root serves one rank after another. If there are fewer cores than ranks, the waiting ranks slow it down: to a
    third of its speed on two cores with four ranks.
    """

    def recv() -> None:
        while not ranks.Iprobe(root, _TAG):
            time.sleep(_NAP)

    ranks.wait_for(recv)


def _pickled(part: Column, dest: int) -> Iterator[tuple[int, bytes]]:
    """Yield a part's objects in pickles of about ``_PICKLE_BYTES`` each, with the rank they are for."""
    begin, length = 0, _FIRST_CHUNK
    while begin < len(part.positions):
        objects = part.select(range(begin, min(begin + length, len(part.positions)))).rows()
        pickled = pickle.dumps(objects, protocol=pickle.HIGHEST_PROTOCOL)
        yield dest, pickled
        begin += len(objects)
        length = max(1, min(_MOST_AT_ONCE, _PICKLE_BYTES * len(objects) // len(pickled)))


def _row_pieces(length: int, layout: ArrayLayout, max_buf_len: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of pieces of ``length`` rows; they must be the same on the root and the receiver."""
    if layout.row_bytes == 0:
        return
    step = max(1, min(_GATHER_BYTES, max_buf_len) // layout.row_bytes)
    for begin in range(0, length, step):
        yield begin, min(begin + step, length)


def _byte_pieces(array: _Array, max_buf_len: int) -> Iterator[_Array]:
    """Yield the bytes of a C-contiguous array, as views of at most ``max_buf_len`` each."""
    flat = array.reshape(-1).view(np.uint8)
    for begin in range(0, flat.size, max_buf_len):
        yield flat[begin : begin + max_buf_len]
