"""Questions to other ranks, which answer while their programs do something else, or have ended."""

import gc
import multiprocessing
import queue
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mpi4py import MPI

from mn_comm import Ranks, create_communicator

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
COMM = create_communicator("naive")
OTHERS = [rank for rank in range(SIZE) if rank != RANK]


def desk():
    return COMM._contexts.desk


def threads():
    return [each for each in threading.enumerate() if each.name == "mn_comm-answers"]


def test_a_rank_that_waits_elsewhere_answers():
    questions = COMM.questions(lambda question: (RANK, question))
    if RANK == 0:
        for _ in range(20):
            for rank in OTHERS:
                assert questions.ask(rank, "where?") == (rank, "where?")
    COMM.barrier()


def test_all_ask_all_at_once():
    questions = COMM.questions(lambda question: np.full(question, RANK))
    for n in (0, 3, 100_000):
        for rank in OTHERS:
            np.testing.assert_array_equal(questions.ask(rank, n), np.full(n, rank))


class Impatient(queue.SimpleQueue):
    """The object at which the asking thread waits when Ctrl-C arrives."""

    def get(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("question", ["short", "long" * 100_000], ids=["short", "long"])
def test_ctrl_c_while_an_answer_is_waited_for(monkeypatch, question):
    """It may come when the message is found and not received yet: the rank that sends a long one waits for that."""
    questions = COMM.questions(lambda question: question)
    mprobe, asking = Ranks.Mprobe, threading.current_thread()

    def interrupted(*args):
        found = mprobe(*args)
        if threading.current_thread() is asking:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Ranks, "Mprobe", interrupted)
    monkeypatch.setattr(queue, "SimpleQueue", Impatient)
    for rank in OTHERS:
        with pytest.raises(KeyboardInterrupt):
            questions.ask(rank, question)
    monkeypatch.undo()
    for rank in OTHERS:
        assert questions.ask(rank, "second") == "second"
    COMM.barrier()
    assert not desk()._waiting


def test_long_questions_and_answers_cross():
    """No rank's thread waits for another rank to receive, because that rank may be sending as well."""
    questions = COMM.questions(lambda question: question[::-1])
    for _ in range(5):
        for rank in OTHERS:
            assert questions.ask(rank, "ab" * 1_000_000) == "ba" * 1_000_000
    COMM.barrier()


def test_a_question_that_cannot_be_unpickled_there():
    questions = COMM.questions(str)
    for rank in OTHERS:
        with pytest.raises(RuntimeError, match=f"on rank {rank}: .*only here"):
            questions.ask(rank, OnlyHere())
        with pytest.raises(Exception, match="pickle"):
            questions.ask(rank, lambda: None)
        assert questions.ask(rank, 1) == "1"
    COMM.barrier()


class OnlyHere:
    """Can be pickled, but not unpickled."""

    def __reduce__(self):
        return _fail, ()


def _fail():
    raise RuntimeError("only here")


def test_several_threads_ask():
    questions = COMM.questions(lambda question: question)
    wrong = []

    def ask(thread):
        for i in range(20):
            for rank in OTHERS:
                if questions.ask(rank, (thread, i)) != (thread, i):
                    wrong.append((thread, i, rank))

    asking = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert not wrong


def test_several_who_answer():
    many = [COMM.questions(lambda question, i=i: i * question) for i in range(5)]
    for i, questions in enumerate(many):
        for rank in OTHERS:
            assert questions.ask(rank, "x") == i * "x"
    assert len(threads()) == min(1, SIZE - 1)


def test_what_an_answer_raises_is_raised_where_it_was_asked_for():
    def answer(question):
        if question == "lambda":
            return lambda: None
        raise ZeroDivisionError(f"rank {RANK} cannot")

    questions = COMM.questions(answer)
    for rank in OTHERS:
        with pytest.raises(RuntimeError, match=f"on rank {rank}: ZeroDivisionError: rank {rank} cannot"):
            questions.ask(rank, 1)
        with pytest.raises(Exception, match="pickle"):
            questions.ask(rank, "lambda")
        with pytest.raises(RuntimeError, match=f"rank {rank} cannot"):
            questions.ask(rank, 2)


class Keeper:
    """Answers."""

    def __call__(self, question):
        return question


def wait_until(is_so):
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_answer_is_kept_until_no_rank_can_ask_any_more():
    keeper = Keeper()
    questions = COMM.questions(keeper)
    kept = weakref.ref(keeper)
    del keeper
    if RANK != 0:
        del questions
    gc.collect()
    if RANK == 0:
        for rank in OTHERS:
            assert questions.ask(rank, 5) == 5
        assert kept() is not None
        del questions
        gc.collect()
    wait_until(lambda: kept() is None)
    COMM.barrier()


def in_child(queue):
    queue.put(len(threads()))


def test_a_fork_has_no_such_thread():
    questions = COMM.questions(str)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python warns of a fork while threads run
        process = context.Process(target=in_child, args=(queue,))
        process.start()
    assert queue.get(timeout=20) == 0
    process.join()
    for rank in OTHERS:
        assert questions.ask(rank, 1) == "1"
    COMM.barrier()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # these threads are the test's own, and Python warns of them
def test_threads_that_fork_at_once():
    """A thread that has ended for one fork must not start again before another fork, or end twice."""
    questions = COMM.questions(str)

    def fork():
        for _ in range(20):
            child = multiprocessing.get_context("fork").Process(target=int)
            child.start()
            child.join()

    with ThreadPoolExecutor(4) as pool:
        forks = [pool.submit(fork) for _ in range(4)]
        while not all(each.done() for each in forks):
            for rank in OTHERS:
                assert questions.ask(rank, 1) == "1"
    for each in forks:
        each.result()
    assert len(threads()) == (1 if OTHERS else 0)  # with a single rank, no other rank can ask
    COMM.barrier()


def test_a_communicator_that_is_freed():
    mpi_comm = WORLD.Dup()
    comm = create_communicator("naive", mpi_comm)
    questions = comm.questions(str)
    before = len(threads())
    for rank in OTHERS:
        assert questions.ask(rank, 1) == "1"
    comm.barrier()
    mpi_comm.Free()
    assert len(threads()) == max(0, before - 1)
    del questions
    gc.collect()
