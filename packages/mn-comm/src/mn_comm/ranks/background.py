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
from mn_comm.basis.thread import Thread
from mn_comm.ranks.watch import activity

_T = TypeVar("_T")
_U = TypeVar("_U")
_Task = Callable[[], None]
_Tasks = SimpleQueue[tuple[_Task, _Task | None] | None]


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
        # Held until there is a result. Not an Event: a signal handler that raises could leave it locked forever.
        self._pending: threading.Lock | None = None
        if worker is None:
            self._run()
        else:
            self._pending = threading.Lock()
            self._pending.acquire()
            worker.put(self._run, self._pending.release)

    def wait(self) -> _T:
        """Wait for the result, and return it, or raise the exception that computing it raised."""
        self._wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    def succeeds(self) -> bool:
        """Wait until it is known whether there is a result rather than an exception; return whether."""
        self._wait()  # what a signal handler raises here is no result
        return self._error is None

    def then(self, function: Callable[[_T], _U]) -> Future[_U]:
        """Return a future of a function of the result; the function is called where the result is computed."""
        return Future(lambda: function(self.wait()), self._worker)

    def _wait(self) -> None:
        if self._pending is not None and self._pending.locked():
            activity().wait_for_thread(self._await_result)

    def _await_result(self) -> None:
        assert self._pending is not None
        with self._pending:
            pass

    def _run(self) -> None:
        compute, self._compute = self._compute, None
        assert compute is not None
        try:
            self._value = compute()
        except BaseException as error:
            self._error = error


def once(function: Callable[[], _T]) -> Callable[[], _T]:
    """Return a function that calls another one only the first time, and then returns or raises the same again.

    So a worker may be given the same task twice.
    """
    uncalled, called = [function], []

    def call() -> _T:
        if uncalled:
            called.append(Future(uncalled.pop()))  # whatever it holds is free from then on
        return called[0].wait()

    return call


class Worker:
    """A thread that runs tasks in the order in which they were put; it starts with the first task.

    An idle thread ends before the process forks, because no threads must run then; the next task starts a new one.
    """

    def __init__(self) -> None:
        self.forget()
        _workers.add(self)
        _see_to_the_end_and_forks()

    @property
    def is_caller(self) -> bool:
        """Whether the calling thread is its thread."""
        return self._thread is threading.current_thread()

    def put(self, task: _Task, announce: _Task | None = None) -> None:
        """Add a task, to be run after all earlier ones.

        Args:
            task: The task.
            announce: Called after it. From then on the task does not count as unfinished: whoever has waited for it may
                fork.
        """
        with self._lock:
            if self._thread is None:
                self._start()
            self._unfinished += 1
            self._tasks.put((task, announce))

    def close(self, wait: bool = True) -> None:
        """Finish all tasks, and end the thread; without ``wait``, return immediately: nothing may be put any more."""
        thread = self._dismiss()
        if thread is not None and wait:
            thread.await_end()

    def rest(self) -> None:
        """End the thread if it has nothing to do."""
        with self._lock:  # another thread may put a task
            thread = None if self._unfinished else self._dismiss()
        if thread is not None:
            thread.await_end()

    def forget(self) -> None:
        """Begin again, in a forked child, which has none of the threads, one of which may have held the lock."""
        self._tasks: _Tasks = SimpleQueue()  # of this thread: what ends it must reach no later one
        self._thread: Thread | None = None
        self._unfinished = 0
        self._lock = threading.RLock()  # a finalizer may close one worker while another one is working

    def _start(self) -> None:
        tasks: _Tasks = SimpleQueue()
        thread = Thread(functools.partial(self._run, tasks), "mn_comm")
        try:
            thread.start()
        except BaseException:  # there can be no thread, or a signal handler has raised: then there may be one
            tasks.put(None)
            raise
        self._tasks, self._thread = tasks, thread

    def _dismiss(self) -> Thread | None:
        """Let the thread end after its last task, and return it."""
        with self._lock:
            thread = self._thread
            if thread is not None:
                _ending.add(thread)  # before it is forgotten here: whoever waits for it may be interrupted
                self._thread = None
                self._tasks.put(None)
        return thread

    def _run(self, tasks: _Tasks) -> None:
        doing = activity()
        doing.polls, doing.purpose = True, lambda: "gradients, in the background"
        # Whoever reads the means handles an overflow; an exception here would leave the other ranks waiting.
        np.seterr(all="ignore")
        while (found := tasks.get()) is not None:
            task, announce = found
            task()
            del found, task  # it may hold arrays, and the next task may come much later
            with self._lock:
                self._unfinished -= 1
            if announce is not None:
                announce()


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_ending: weakref.WeakSet[Thread] = weakref.WeakSet()  # Python itself keeps running threads alive


def _rest_all() -> None:
    for worker in list(_workers):
        worker.rest()


def _forget_all() -> None:
    _ending.clear()
    for worker in list(_workers):
        worker.forget()


def close_all() -> None:
    """Finish the tasks of all workers, and end their threads."""
    for worker in list(_workers):
        worker.close()
    for thread in list(_ending):
        thread.await_end()


@functools.cache
def _see_to_the_end_and_forks() -> None:
    """Register what threads need; not at import, because a program without workers needs nothing."""
    # Tasks must end before MPI does, which is finalized after this.
    at_exit(close_all)
    # Since 3.12, Python warns about a fork while threads run, for a good reason: the child does not have these threads.
    os.register_at_fork(before=_rest_all, after_in_child=_forget_all)
