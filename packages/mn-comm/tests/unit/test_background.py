"""The thread that communicates in the background."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

from mn_comm.ranks.background import Future, Worker, close_all


@pytest.fixture(autouse=True)
def without_threads():
    close_all()
    yield
    close_all()


def thread_of(worker):
    return Future(threading.get_ident, worker).wait()


@contextlib.contextmanager
def interrupted():
    """Interrupt what is done in the block, which waits, by a signal handler that raises."""

    def handle(*_):
        raise TimeoutError

    there = signal.signal(signal.SIGUSR1, handle)
    threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)).start()
    try:
        with pytest.raises(TimeoutError):
            yield
    finally:
        signal.signal(signal.SIGUSR1, there)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "mn_comm"]


def test_each_worker_has_a_thread_until_it_is_closed():
    workers = [Worker() for _ in range(5)]
    assert len({thread_of(worker) for worker in workers}) == 5
    for worker in workers:
        worker.close()
    assert not threads()


def test_a_closed_worker_can_be_used_again():
    worker = Worker()
    for expected in range(3):
        assert Future(lambda expected=expected: expected, worker).wait() == expected
        worker.close()


@pytest.mark.parametrize("wait", [True, False])
def test_tasks_are_finished_before_the_thread_ends(wait):
    worker, done = Worker(), []
    for number in range(100):
        worker.put(lambda number=number: done.append(number))
    worker.close(wait)
    close_all()
    assert done == list(range(100))


def test_a_closed_worker_is_held_by_nothing():
    worker = Worker()
    thread_of(worker)
    worker.close()
    gone = threading.Event()
    weakref.finalize(worker, gone.set)
    del worker
    assert gone.wait(10)


def test_no_thread_runs_during_a_fork():
    worker = Worker()
    thread_of(worker)
    child = os.fork()
    if not child:
        os._exit(len(threads()))
    assert os.waitpid(child, 0)[1] == 0
    assert not threads()
    thread_of(worker)  # it takes a new one
    assert len(threads()) == 1
    worker.close()


def test_a_thread_may_rest_once_its_last_task_is_announced():
    worker, unfinished, announced = Worker(), [], threading.Event()
    worker.put(lambda: None, lambda: (unfinished.append(worker._unfinished), announced.set()))
    assert announced.wait(10)
    assert unfinished == [0]


WITHOUT_A_COMMUNICATOR = """
import threading
from mn_comm.building_blocks import Worker, at_exit
at_exit(lambda: print("first"))
worker = Worker()
is_ending = threading.Event()
worker.put(lambda: (is_ending.wait(), print("task")))
at_exit(is_ending.set)
"""


def test_tasks_end_and_functions_are_called_at_exit_without_a_communicator():
    job = subprocess.run([sys.executable, "-c", WITHOUT_A_COMMUNICATOR], capture_output=True, text=True)
    assert (job.stdout.split(), job.stderr) == (["task", "first"], "")


def test_a_function_that_raises_at_exit_does_not_keep_others_from_being_called():
    script = WITHOUT_A_COMMUNICATOR + "at_exit(lambda: 1 / 0)\n"
    job = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert job.stdout.split() == ["task", "first"]
    assert "ZeroDivisionError" in job.stderr


def test_a_thread_may_put_tasks_while_another_one_forks():
    """Before a fork, idle threads end: that must neither lose a task nor wait for one that comes later."""
    interval = sys.getswitchinterval()
    worker, ended = Worker(), threading.Event()

    def rest():
        while not ended.is_set():
            worker.rest()

    thread = threading.Thread(target=rest, daemon=True)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(3000):
            done = threading.Event()
            worker.put(done.set)
            assert done.wait(20)
    finally:
        ended.set()
        sys.setswitchinterval(interval)
    thread.join(20)
    assert not thread.is_alive()


# What is registered first is called last before a fork: after idle threads have ended.
HELD = """
import os, threading
held = threading.Event()

def hold():
    with worker._lock:
        held.set()
        threading.Event().wait()

def hold_in_another_thread():
    threading.Thread(target=hold, daemon=True).start()
    held.wait()

os.register_at_fork(before=hold_in_another_thread)
from mn_comm.ranks.background import Future, Worker
worker = Worker()
assert Future(lambda: 1, worker).wait() == 1
child = os.fork()
if child == 0:
    os._exit(Future(lambda: 2, worker).wait())
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_begins_with_a_worker_of_its_own():
    """At the fork, another thread may have held the lock."""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", HELD], timeout=30).returncode == 2


def test_a_thread_is_waited_for_even_if_that_was_interrupted_before():
    worker, released = Worker(), threading.Event()
    finished = Future(lambda: released.wait(20), worker)
    with interrupted():
        worker.close()
    threading.Timer(0.2, released.set).start()
    close_all()
    assert not finished._pending.locked()


def test_the_exception_of_a_signal_handler_is_no_failed_result():
    released = threading.Event()
    future = Future(lambda: released.wait(20), Worker())
    with interrupted():
        future.succeeds()
    released.set()
    assert future.succeeds()


def test_a_thread_that_cannot_be_started_is_started_next_time(monkeypatch):
    worker, start = Worker(), threading.Thread.start

    def fail(_):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        worker.put(lambda: None)
    assert Future(lambda: 1, worker).wait() == 1


def raise_in_wait(future, after):
    """Wait for a future, and raise after a number of calls, where Python may call a signal handler."""
    left = [after]

    def profile(_frame, event, _argument):
        if event in ("call", "c_return"):
            left[0] -= 1
            if not left[0]:
                raise TimeoutError

    sys.setprofile(profile)
    try:
        future.wait()
    except TimeoutError:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_wherever_a_signal_handler_raises_in_a_wait_later_results_come():
    worker = Worker()
    for after in range(1, 100):
        going = threading.Lock()
        going.acquire()
        future = Future(going.acquire, worker)
        threading.Timer(0.01, going.release).start()
        was_interrupted = raise_in_wait(future, after)
        assert future.wait()
        assert Future(lambda: 1, worker).wait() == 1
        if not was_interrupted:
            return
    pytest.fail("it was always interrupted")
