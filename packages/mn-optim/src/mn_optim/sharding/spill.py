"""Arrays in files without a name, for a serializer that keeps all arrays until it writes."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import numpy as np

__all__ = ["Spill"]

# Each file needs a descriptor, and a process may have only a few.
_FILE_BYTES = 64 * 1024 * 1024
_LEAST_BYTES = 64 * 1024
_ALIGNMENT = 64


class Spill:
    """Moves arrays to files, so that the system does not have to keep them in memory.

    The files are in Python's folder for temporary files (``TMPDIR``), and disappear with the last array that uses them.
    """

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint8)

    def move(self, array: Any) -> Any:
        """Return an equal array in a file; or the same array if it is small, or if this is not possible.

        Args:
            array: An array in host memory; any other object is returned unchanged.
        """
        if not isinstance(array, np.ndarray) or array.dtype.hasobject or array.nbytes < _LEAST_BYTES:
            return array
        if self._room.size < array.nbytes:
            try:
                self._room = _make_room(max(_FILE_BYTES, array.nbytes))
            except OSError:  # the disk is full: the array stays in memory
                return array
        moved = self._room[: array.nbytes].view(array.dtype).reshape(array.shape)
        moved[...] = array
        self._room = self._room[-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return moved


def _make_room(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk is an exception now, not a SIGBUS
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
