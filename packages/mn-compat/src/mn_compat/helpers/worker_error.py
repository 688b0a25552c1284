"""Carries an exception, or the death of a worker, from an iterator's threads and processes to the training script."""

from __future__ import annotations

import math
import multiprocessing
import signal
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.pool import Pool
from typing import Any

_workers_of: weakref.WeakKeyDictionary[Pool, dict[int, Any]] = weakref.WeakKeyDictionary()
_failure_of: weakref.WeakKeyDictionary[Pool, Exception] = weakref.WeakKeyDictionary()


def outcome_of(function: Callable[[], list[Any]]) -> list[Any] | Exception:
    """Return the list that a function returns, or the exception that it raises."""
    try:
        return function()
    except Exception as error:
        return error


def result(outcome: Any) -> Any:
    """Return a result; raise an exception."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def then(outcome: list[Any] | Exception, function: Callable[[Any], Any]) -> list[Any] | Exception:
    """Return the results of a function for each item of an outcome, or the exception that the outcome is."""
    return outcome if isinstance(outcome, Exception) else [function(item) for item in outcome]


class Task:
    """The computation of a function for some items by a pool, which fails when one of the pool's workers dies.

    A pool replaces a worker that has died, but forgets the worker's task: its result never arrives.

    Args:
        pool: The pool. After one of its workers has died, it computes nothing more.
        function: The function, which is called with each item.
        items: The items.
    """

    def __init__(self, pool: Pool, function: Callable[[Any], Any], items: Iterable[Any]) -> None:
        self._pool = pool
        self._workers: dict[int, Any] = _workers_of.setdefault(pool, {})
        self._note_workers()  # the pool soon forgets a worker that dies
        items = list(items)
        # The default, but the pool divides by its number of workers now: none, if all are just being replaced.
        chunksize = max(1, math.ceil(len(items) / (4 * pool._processes)))  # type: ignore[attr-defined]  # noqa: SLF001
        self._result = None if pool in _failure_of else pool.map_async(function, items, chunksize)

    def get(self, timeout: float) -> list[Any] | Exception:
        """Return the results, or the exception for which there are none.

        Raises:
            multiprocessing.TimeoutError: There is no outcome within ``timeout`` seconds.
        """
        if self._result is not None:
            self._result.wait(timeout)
            if self._result.ready():
                return outcome_of(self._result.get)
            self._look_for_the_dead()
        if self._pool in _failure_of:
            return _failure_of[self._pool]
        raise multiprocessing.TimeoutError

    def _note_workers(self) -> None:
        workers: list[Any] = list(self._pool._pool)  # type: ignore[attr-defined]  # noqa: SLF001
        self._workers.update({worker.pid: worker for worker in workers})
        # They keep two files open each.
        for process in [process for process, worker in self._workers.items() if self._has_ended_well(worker)]:
            del self._workers[process]

    def _has_ended_well(self, worker: Any) -> bool:
        may_end = bool(self._pool._maxtasksperchild)  # type: ignore[attr-defined]  # noqa: SLF001
        return may_end and worker.exitcode == 0

    def _look_for_the_dead(self) -> None:
        self._note_workers()
        for process, worker in self._workers.items():
            if worker.exitcode is not None and not self._has_ended_well(worker):
                _failure_of[self._pool] = RuntimeError(_describe(process, worker.exitcode))
                self._pool.terminate()  # closing it would wait for the result
                return


def _describe(process: int, status: int) -> str:
    names = {each.value: each.name for each in signal.Signals}  # most real-time signals have none
    killer = names.get(-status, f"signal {-status}")
    how = f"was killed by {killer}" if status < 0 else f"ended with status {status}"
    reason = ", as the system does when memory has run out" if status == -signal.SIGKILL else ""
    return f"worker process {process} of the iterator {how}{reason}, so the samples that it was reading are lost"
