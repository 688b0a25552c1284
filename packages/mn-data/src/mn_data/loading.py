"""Reading samples: when they are needed, or ahead of time in separate processes."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

_dataset: Any = None


class Loader:
    """Reads samples.

    Args:
        dataset: The dataset.
        n_processes: How many processes read; 0 to read in this process.
    """

    def __init__(self, dataset: Any, n_processes: int) -> None:
        self._dataset = dataset
        self.n_processes = n_processes
        # Not a multiprocessing.Pool: it hangs if a process is ended while it writes a result, by terminate() too.
        self._pool: ProcessPoolExecutor | None = None
        self._ahead: dict[tuple[int, ...], list[Future[list[Any]]]] = {}

    def load(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of these indices.

        Raises:
            BrokenProcessPool: A process that reads has died.
        """
        if not self.n_processes:
            return [self._dataset[index] for index in indices]
        parts = self._ahead.pop(tuple(indices), None) or self._start(indices)
        return list(itertools.chain.from_iterable(part.result() for part in parts))

    def expect(self, batches: Sequence[Sequence[int]]) -> None:
        """Read ahead samples that will probably be requested next, and discard earlier ones; needs processes."""
        known = self._ahead
        wanted = [tuple(each) for each in batches]
        for each in known.keys() - set(wanted):
            for part in known[each]:
                part.cancel()
        self._ahead = {each: known.get(each) or self._start(each) for each in wanted}

    def close(self) -> None:
        """End the processes when they have read what they are reading; the next :meth:`load` starts new ones."""
        pool = self._pool
        self.drop()
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def drop(self) -> None:
        """Do as :meth:`close` does, but without waiting until the processes have ended."""
        self.expect([])
        self._pool = None  # a pool that is no longer used ends its processes

    def _start(self, indices: Sequence[int]) -> list[Future[list[Any]]]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.n_processes, initializer=_begin, initargs=(self._dataset,))
        length = max(1, -(-len(indices) // self.n_processes))
        begins = range(0, len(indices), length)
        return [self._pool.submit(_read, indices[begin : begin + length]) for begin in begins]


def _begin(dataset: Any) -> None:
    global _dataset
    _dataset = dataset
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank ends them
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    """End this process when the rank has ended, for a rank that is killed; the launcher would wait for its output."""
    rank: Any = multiprocessing.parent_process()
    ends = [rank.sentinel]
    with contextlib.suppress(OSError, AttributeError):  # an old kernel, or not Linux
        ends.append(os.pidfd_open(rank.pid))  # the sentinel is also held by what the rank has started since
    multiprocessing.connection.wait(ends)
    os._exit(1)


def _read(indices: Sequence[int]) -> list[Any]:
    return [_dataset[index] for index in indices]
