"""The thread that communicates in the background, and futures for its results."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np

from mn_comm.basis.guard import at_exit
from mn_comm.ranks.watch import activity

__all__ = ["Future", "Worker", "close_all"]

_T = TypeVar("_T")
_U = TypeVar("_U")
_Task = Callable[[], None]


class Future(Generic[_T]):
    """A result that may still have to be computed, by a worker or when it is requested.

    Args:
        compute: Returns the result.
        worker: The thread that computes it; ``None`` to compute it immediately.
    """

    def __init__(self, compute: Callable[[], _T], worker: Worker | None = None) -> None:
        self._compute: Callable[[], _T] | None = compute
        self._worker = worker
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = None if worker is None else threading.Event()
        if worker is None:
            self._run()
        else:
            worker.put(self._run)

    def wait(self) -> _T:
        """Wait for the result, and return it.

        Raises:
            BaseException: The exception that computing it raised.
        """
        if self._done is not None and not self._done.is_set():
            activity().wait_for_thread(self._done.wait)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    def succeeds(self) -> bool:
        """Wait until it is known whether there is a result rather than an exception; return whether."""
        try:
            self.wait()
        except Exception:
            return False
        return True

    def then(self, function: Callable[[_T], _U]) -> Future[_U]:
        """Return a future of a function of the result; the function is called where the result is computed."""
        return Future(lambda: function(self.wait()), self._worker)

    def _run(self) -> None:
        compute, self._compute = self._compute, None
        assert compute is not None
        try:
            self._value = compute()
        except BaseException as error:
            self._error = error
        if self._done is not None:
            self._done.set()


class Worker:
    """Runs tasks in a thread, in the order in which they were put; it takes a thread for the first task.

    Before a fork of the process, idle threads end, because no threads must run during a fork; the next task starts a
    new one.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._has_ended: threading.Event | None = None
        self._unfinished = 0
        self._lock = threading.RLock()  # a finalizer may close one worker while another one is working
        _workers.add(self)
        _see_to_the_end_and_forks()

    def put(self, task: _Task) -> None:
        """Add a task, to be run after all earlier ones."""
        with self._lock:
            self._unfinished += 1
            if self._has_ended is None:
                self._has_ended = _call_in_thread(self._run)
        self._tasks.put(task)

    def close(self, wait: bool = True) -> None:
        """Finish all tasks, and give the thread back.

        Args:
            wait: Whether to wait until then. If not, nothing may be put any more.
        """
        with self._lock:
            has_ended, self._has_ended = self._has_ended, None
        if has_ended is None:
            return
        self._tasks.put(None)
        if wait:
            has_ended.wait()
        else:
            _ending.add(has_ended)

    def rest(self) -> None:
        """Give the thread back if it has nothing to do."""
        if not self._unfinished:
            self.close()

    def _run(self) -> None:
        doing = activity()
        doing.polls, doing.purpose = True, lambda: "gradients, in the background"
        # Whoever reads the means handles an overflow; an exception here would leave the other ranks waiting.
        np.seterr(all="ignore")
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it may hold arrays, and the next task may come much later
            with self._lock:
                self._unfinished -= 1


class _Thread:
    """A thread that works for one worker after the other.

    It is used again because MPICH 5.0 keeps about 750 bytes for every thread that has called it, also when that thread
    has ended.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[_Task, threading.Event] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mn_comm", daemon=True)
        self._thread.start()

    def call(self, function: _Task) -> threading.Event:
        """Call a function in the thread; the event is set when it has returned."""
        has_ended = threading.Event()
        self._work.put((function, has_ended))
        return has_ended

    def end(self) -> None:
        """End the thread, which must be idle."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_kept = True
        while is_kept and (work := self._work.get()) is not None:
            function, has_ended = work
            try:
                function()
                is_kept = _keep(self)
            finally:
                has_ended.set()
            del work, function, has_ended  # the function holds its worker


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_ending: weakref.WeakSet[threading.Event] = weakref.WeakSet()  # a thread holds its event while it works
_idle: list[_Thread] = []  # one at most
_lock = threading.Lock()


def _call_in_thread(function: _Task) -> threading.Event:
    """Call a function in the idle thread, or in a new one; the event is set when it has returned."""
    with _lock:
        thread = _idle.pop() if _idle else None
    return (thread or _Thread()).call(function)


def _keep(thread: _Thread) -> bool:
    """Keep a thread for the next worker, unless another one is idle already; return whether."""
    with _lock:
        if not _idle:
            _idle.append(thread)
        return _idle[0] is thread


def _end_idle() -> None:
    with _lock:
        ending = _idle.copy()
        _idle.clear()
    for thread in ending:
        thread.end()


def _rest_all() -> None:
    for worker in list(_workers):
        worker.rest()
    _end_idle()


def close_all() -> None:
    """Finish the tasks of all workers, and end their threads."""
    for worker in list(_workers):
        worker.close()
    for has_ended in list(_ending):
        has_ended.wait()
    _end_idle()


@functools.cache
def _see_to_the_end_and_forks() -> None:
    """Register what threads need; not at import, because a program without workers needs nothing."""
    # Tasks must end before MPI does, which is finalized after this.
    at_exit(close_all)
    # Since 3.12, Python warns about a fork while threads run, for a good reason: the child does not have these threads.
    os.register_at_fork(before=_rest_all)
