"""Arrays that outlive a job, in memory that the keeper of a node holds."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mn_guard.supervised import link

_Array = np.ndarray[Any, Any]
_ALIGNMENT = 64  # bytes: of a cache line
_LENGTH_BYTES = 8


class NodeMemory:
    """Arrays that the ranks of a node save for the next attempt of a job that ``chainermn elastic`` supervises.

    There is one set of arrays. A new set replaces it only when it is complete: if a process is killed while it writes,
    the previous set remains. Must not be used by several threads at the same time.

    Example:
        >>> mn_elastic.NodeMemory().is_there  # this job is not supervised
        False
    """

    def __init__(self) -> None:
        self._connection = link.connection()
        supervision = link.supervision()
        self._attempt = 0 if supervision is None else supervision.attempt
        self._spare: list[_File] = []

    @property
    def is_there(self) -> bool:
        """Whether this job is supervised, so that arrays can be saved."""
        return self._connection is not None

    def put(self, number: int, arrays: Mapping[str, _Array], generation: int = 0) -> None:
        """Save arrays; they replace the previous ones.

        Args:
            number: A number for this set of arrays: for example, the iteration.
            arrays: Arrays in host memory, of any dtype but objects. They are copied.
            generation: That of an elastic communicator. Arrays of a later one are not replaced: a rank that was stopped
                may go on when the others have continued without it.

        Raises:
            RuntimeError: The job is not supervised.
            TypeError: An array holds Python objects.
            OSError: There is no memory left, or the keeper is gone.
        """
        if self._connection is None:
            raise RuntimeError("expected a job started by chainermn elastic, to keep arrays for its next attempt")
        # The arrays that were saved last are in the other file.
        file = self._spare.pop(0) if len(self._spare) > 1 else _File()
        # If this fails, that file is dropped, and the keeper holds the remaining one, or none of the two.
        file.write(arrays)
        self._connection.ask({"op": "keep", "number": number, "in": [self._attempt, generation]}, file.descriptor)
        self._spare.append(file)

    def get(self) -> tuple[int, dict[str, _Array]] | None:
        """Return the number and the arrays that a rank of this node has saved last."""
        if self._connection is None:
            return None
        answer, descriptor = self._connection.ask({"op": "load"})
        if descriptor is None:
            return None
        try:
            return answer["number"], _read(descriptor)
        finally:
            os.close(descriptor)


class _File:
    """A file in memory, which is written repeatedly."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("chainermn")
        self._mapped: mmap.mmap | None = None

    def write(self, arrays: Mapping[str, _Array]) -> None:
        places, end = [], 0
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise TypeError(f"expected arrays without Python objects, got dtype {array.dtype} in {name}")
            places.append((name, array.dtype, array.shape, end))
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        head = pickle.dumps(places)
        begin = _begin(len(head))
        view = self._of_size(begin + end)
        view[:_LENGTH_BYTES] = len(head).to_bytes(_LENGTH_BYTES, "little")
        view[_LENGTH_BYTES : _LENGTH_BYTES + len(head)] = head
        for (_, dtype, shape, offset), array in zip(places, arrays.values(), strict=True):
            np.ndarray(shape, dtype, buffer=view, offset=begin + offset)[...] = array

    def _of_size(self, size: int) -> mmap.mmap:
        if self._mapped is None or len(self._mapped) != size:
            os.posix_fallocate(self.descriptor, 0, size)  # so that it fails here, not at the first access
            os.ftruncate(self.descriptor, size)
            self._mapped = mmap.mmap(self.descriptor, size)
        return self._mapped

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, modules may be gone
        close(self.descriptor)


def _begin(head: int) -> int:
    return -(-(_LENGTH_BYTES + head) // _ALIGNMENT) * _ALIGNMENT


def _read(descriptor: int) -> dict[str, _Array]:
    view = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE)  # a process that writes to it gets a copy
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    begin, places = _begin(length), pickle.loads(view[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return {name: np.ndarray(shape, dtype, buffer=view, offset=begin + offset) for name, dtype, shape, offset in places}
