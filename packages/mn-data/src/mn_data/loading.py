"""Reading samples: when they are needed, or ahead of time in separate processes."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
from collections.abc import Sequence
from typing import Any

__all__ = ["Loader"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_dataset: Any = None


class Loader:
    """Reads samples.

    Args:
        dataset: The dataset.
        n_processes: How many processes read; 0 to read in this process.
    """

    def __init__(self, dataset: Any, n_processes: int) -> None:
        self._dataset = dataset
        self._n_processes = n_processes
        self._pool: Any = None
        self._ahead: dict[tuple[int, ...], Any] = {}

    @property
    def is_parallel(self) -> bool:
        """Whether it can read ahead."""
        return self._n_processes > 0

    def load(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of these indices."""
        if not self._n_processes:
            return [self._dataset[index] for index in indices]
        result = self._ahead.pop(tuple(indices), None) or self._start(indices)
        samples: list[Any] = result.get()
        return samples

    def expect(self, batches: Sequence[Sequence[int]]) -> None:
        """Read ahead samples that will probably be requested next, and discard earlier ones."""
        if self._n_processes:
            known = self._ahead
            self._ahead = {tuple(each): known.get(tuple(each)) or self._start(each) for each in batches}

    def close(self) -> None:
        """End the processes; the next :meth:`load` starts new ones."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = None

    def _start(self, indices: Sequence[int]) -> Any:
        if self._pool is None:
            self._pool = multiprocessing.Pool(self._n_processes, _begin, (self._dataset,))
        return self._pool.map_async(_read, indices, chunksize=max(1, -(-len(indices) // self._n_processes)))


def _begin(dataset: Any) -> None:
    global _dataset
    _dataset = dataset
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank ends them
    with contextlib.suppress(OSError, AttributeError):  # prctl exists only on Linux
        # A rank that is killed cannot end them, and the launcher would wait for their output.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(index: int) -> Any:
    return _dataset[index]
