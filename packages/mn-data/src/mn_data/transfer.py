"""Sending one column of a dataset from the root to the ranks, each of which receives only its own samples.

An array is sent as raw bytes, in pieces, and received directly into its final memory; samples that are not contiguous
are collected piece by piece. Python objects are pickled a few thousand at a time, so that there is never a pickle of
all of them, and the ranks unpickle while the root pickles.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np

from mn_comm import building_blocks, raise_on_all
from mn_comm.building_blocks import as_bytes, pieces
from mn_data.columns import ArrayLayout, Column

_Array = np.ndarray[Any, Any]

_TAG = 23719  # unlikely to be used by scripts, most of which use 0
_GATHER_BYTES = 1 << 24
_NAP = 0.0005  # seconds
_PICKLE_BYTES = 1 << 20
_FIRST_CHUNK = 256
_MOST_AT_ONCE = 1 << 15
_END, _FAILURE = 0, -1
_PATIENCE = 2.0  # seconds before a progress bar appears


class Transfer(NamedTuple):
    """Sends columns from the root to all ranks; each method is called on every rank, which gets its own samples.

    Attributes:
        ranks: The ranks.
        root: The rank that has the dataset.
        max_buf_len: The maximum number of bytes passed to MPI at once.
        advance: Called with the number of bytes that were moved.
    """

    ranks: building_blocks.Ranks
    root: int
    max_buf_len: int
    advance: Callable[[int], object]

    def send_array(self, parts: Sequence[Column], layout: ArrayLayout) -> _Array:
        """Send each rank its rows of an array, as the root.

        Args:
            parts: Each rank's rows.
            layout: The dtype and shape of a row.

        Returns:
            This rank's rows, in a new array.
        """
        for dest in self._others():
            for begin, end in self._row_pieces(len(parts[dest].positions), layout):
                self._send(np.ascontiguousarray(parts[dest].select(range(begin, end)).rows()), dest)
        own = parts[self.root].rows()
        self.advance(own.nbytes)
        # Copy a view: otherwise the whole array would stay in memory as long as this part of it.
        return np.array(own, copy=True) if own.base is not None else own

    def recv_array(self, length: int, layout: ArrayLayout) -> _Array:
        """Receive ``length`` rows that the root sends by :meth:`send_array`."""
        received: _Array = np.empty((length, *layout.row_shape), layout.dtype)
        if received.nbytes:
            self._wait_idly()
        for begin, end in self._row_pieces(length, layout):
            self._recv(received[begin:end])
        return received

    def send_objects(self, parts: Sequence[Column]) -> list[Any]:
        """Send each rank its objects, as the root; collective, with :meth:`recv_objects` on the other ranks.

        Args:
            parts: Each rank's objects.

        Returns:
            This rank's objects.

        Raises:
            Exception: What pickling raised (on every rank).
        """
        with raise_on_all(self.ranks):
            verdict = _FAILURE
            try:
                # The ranks in turn, so that each always has something to unpickle.
                in_turn = zip_longest(*(_pickled(parts[dest], dest) for dest in self._others()))
                for dest, pickled in filter(None, chain.from_iterable(in_turn)):
                    self.ranks.Send(np.array([len(pickled)], dtype=np.int64), dest, _TAG)
                    self._send(np.frombuffer(pickled, dtype=np.uint8), dest)
                verdict = _END
            finally:
                for dest in self._others():
                    self.ranks.Send(np.array([verdict], dtype=np.int64), dest, _TAG)
        return list(parts[self.root].rows())

    def recv_objects(self) -> list[Any]:
        """Receive objects that the root sends by :meth:`send_objects`; collective, and raises the same exceptions."""
        received: list[Any] = []
        with raise_on_all(self.ranks):
            try:
                for pickled in self._recv_pickled():
                    received.extend(pickle.loads(pickled.data))
            except Exception:
                for _ in self._recv_pickled():
                    pass  # the root continues to send
                raise
        return received

    def _recv_pickled(self) -> Iterator[_Array]:
        length = np.empty(1, dtype=np.int64)
        while True:
            self._wait_idly()
            self.ranks.Recv(length, self.root, _TAG)
            if length[0] in (_END, _FAILURE):
                return
            pickled: _Array = np.empty(int(length[0]), dtype=np.uint8)
            self._recv(pickled)
            yield pickled

    def _others(self) -> list[int]:
        return [rank for rank in range(self.ranks.size) if rank != self.root]

    def _send(self, array: _Array, dest: int) -> None:
        for piece in pieces(as_bytes(array), self.max_buf_len):
            self.ranks.Send(piece, dest, _TAG)
            self.advance(piece.size)

    def _recv(self, array: _Array) -> None:
        for piece in pieces(as_bytes(array), self.max_buf_len):
            self.ranks.Recv(piece, self.root, _TAG)
            self.advance(piece.size)

    def _wait_idly(self) -> None:
        """Wait for the root's next message without keeping a core busy, as MPI would.

        The root serves one rank after another. If there are fewer cores than ranks, the waiting ranks slow it down: to
        a third of its speed on two cores with four ranks.
        """

        def recv() -> None:
            while not self.ranks.Iprobe(self.root, _TAG):
                time.sleep(_NAP)

        self.ranks.wait_for(recv)

    def _row_pieces(self, length: int, layout: ArrayLayout) -> Iterator[tuple[int, int]]:
        """Yield the bounds of pieces of ``length`` rows; they must be the same on the root and the receiver."""
        if layout.row_bytes:
            step = max(1, min(_GATHER_BYTES, self.max_buf_len) // layout.row_bytes)
            for begin in range(0, length, step):
                yield begin, min(begin + step, length)


def _pickled(part: Column, dest: int) -> Iterator[tuple[int, bytes]]:
    """Yield a part's objects in pickles of about ``_PICKLE_BYTES`` each, with the rank they are for."""
    begin, length = 0, _FIRST_CHUNK
    while begin < len(part.positions):
        objects = part.select(range(begin, min(begin + length, len(part.positions)))).rows()
        pickled = pickle.dumps(objects, protocol=pickle.HIGHEST_PROTOCOL)
        yield dest, pickled
        begin += len(objects)
        length = max(1, min(_MOST_AT_ONCE, _PICKLE_BYTES * len(objects) // len(pickled)))


@contextmanager
def progress(is_wanted: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the number of bytes that were moved.

    Args:
        is_wanted: Whether this rank shows the bar; it does so only on a terminal, and after two seconds.
    """
    if not (is_wanted and sys.stderr.isatty()):
        yield lambda nbytes: None
        return
    from tqdm import tqdm  # type: ignore  # it has no types; not earlier: most never need it

    with tqdm(desc="scattering the dataset", unit="B", unit_scale=True, delay=_PATIENCE, leave=False) as bar:
        yield bar.update
