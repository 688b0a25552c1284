"""Questions that a rank may ask another rank at any time, whatever the other rank is doing.

Each rank has a thread that checks regularly for questions, and answers them. This thread also sends the rank's own
questions and receives the answers, so that communication is complete even if an exception, such as Ctrl-C, interrupts
the wait for an answer. The answering object is kept as long as any rank may ask it: the script may have ended on this
rank, but not on another. For the same reason, a process that ends waits until all others end, as MPI itself does.
"""

from __future__ import annotations

import itertools
import pickle
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mn_comm.agreement import describe, remote_error
from mn_comm.collectives.objects import isend_obj, recv_obj
from mn_comm.exit_status import at_exit
from mn_comm.forks import around_forks, no_fork
from mn_comm.mpi import MPI
from mn_comm.watch import activity

if TYPE_CHECKING:
    from mn_comm.ranks import Ranks

__all__ = ["Desk", "Questions"]

_QUESTION, _ANSWER, _CLOSED = 1, 2, 3
# More often while questions arrive, because a rank waits for each answer; each check takes a few microseconds.
_LEAST_PAUSE_SECONDS = 50e-6
_MOST_PAUSE_SECONDS = 20e-3

Answer = Callable[[Any], Any]


class Desk:
    """Answers the questions of other ranks in a thread, which starts when there is something that can answer.

    The thread ends before a fork of the process, during which no threads must run, and starts again after it.

    Args:
        ranks: The ranks, on a communicator that is used for nothing else.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._rank, self._size = ranks.rank, ranks.size  # they may be freed before the last rank that asks
        self._answers: dict[int, Answer] = {}
        self._closed: deque[int] = deque()
        self._remaining: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._asked = itertools.count(1)
        self._to_send: deque[tuple[int, int, Any]] = deque()
        self._sending: list[MPI.Request] = []
        self._waiting: dict[int, queue.SimpleQueue[tuple[bool, Any]]] = {}
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        _desks.add(self)

    @property
    def is_open(self) -> bool:
        """Whether its thread is running."""
        return self._thread is not None

    def open(self, answer: Answer) -> int:
        """Start to answer questions; collective, in the same order on every rank.

        Args:
            answer: Returns the answer to a question.

        Returns:
            The number that other ranks use to ask.
        """
        number = next(self._numbers)
        self._answers[number] = answer
        self._remaining[number] = self._size
        self.start()
        self.ranks.Barrier()  # all ranks must have come here before one is asked
        return number

    def close(self, number: int) -> None:
        """Tell the other ranks that this rank will not ask any more; when no rank will, answering ends."""
        if self._size > 1:
            self._closed.append(number)
        else:
            self._count_down(number)

    def ask(self, rank: int, number: int, question: Any) -> Any:
        """Return another rank's answer; see :meth:`Questions.ask`."""
        asked = next(self._asked)
        answered: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        content = pickle.dumps(question, pickle.HIGHEST_PROTOCOL)  # if it cannot be pickled, the error is raised here
        try:
            self._waiting[asked] = answered
            self._to_send.append((rank, _QUESTION, (number, asked, content)))
            self._wake.set()
            is_answer, value = activity().wait_for(answered.get, "answer", self.ranks)
        finally:
            self._waiting.pop(asked, None)  # answers that arrive later are dropped
        if not is_answer:
            raise remote_error(rank, *value)
        return pickle.loads(value)

    def start(self) -> None:
        """Start the thread, if there is something to answer with, and another rank."""
        with no_fork:
            if self._answers and self._thread is None and self._size > 1:
                self._closing.clear()
                self._thread = threading.Thread(target=self._run, name="mn_comm-answers", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._closing.set()
            self._wake.set()
            self._thread.join()
            self._thread = None

    def free(self) -> None:
        """End the thread, and free the communicator; collective."""
        self._answers.clear()
        self.stop()
        self.ranks.Free()

    def _run(self) -> None:
        activity().polls = True
        pause = _MOST_PAUSE_SECONDS
        while not self._closing.is_set() and not MPI.Is_finalized():
            self._wake.wait(pause)
            self._wake.clear()
            is_busy = self._receive()
            self._send()
            is_busy = is_busy or bool(self._waiting or self._sending)
            pause = _LEAST_PAUSE_SECONDS if is_busy else min(2 * pause, _MOST_PAUSE_SECONDS)

    def _receive(self) -> bool:
        """Receive all messages that have arrived; return whether there were any."""
        found = False
        for tag, take in ((_QUESTION, self._serve), (_ANSWER, self._hand_over), (_CLOSED, self._hear_of_end)):
            status = MPI.Status()
            while self.ranks.Iprobe(MPI.ANY_SOURCE, tag, status):
                take(status.source, recv_obj(self.ranks, status.source, tag, None))
                found = True
        return found

    def _send(self) -> None:
        """Send all pending messages without waiting: another rank's thread may be doing the same."""
        while self._closed:
            number = self._closed.popleft()
            self._count_down(number)
            self._to_send += [(rank, _CLOSED, number) for rank in range(self._size) if rank != self._rank]
        while self._to_send:
            rank, tag, message = self._to_send.popleft()
            self._sending += isend_obj(self.ranks, message, rank, tag)
        self._sending = [request for request in self._sending if not request.Test()]

    def _count_down(self, number: int) -> None:
        self._remaining[number] -= 1
        if not self._remaining[number]:
            del self._remaining[number]
            self._answers.pop(number, None)

    def _hear_of_end(self, rank: int, number: int) -> None:
        self._count_down(number)

    def _hand_over(self, rank: int, reply: tuple[int, bool, Any]) -> None:
        """Pass an answer to the thread that waits for it, unless that thread was interrupted."""
        asked, is_answer, value = reply
        waiting = self._waiting.get(asked)
        if waiting is not None:
            waiting.put((is_answer, value))

    def _serve(self, rank: int, message: tuple[int, int, bytes]) -> None:
        number, asked, content = message
        reply: tuple[int, bool, Any]
        try:
            # It is pickled here, so that a failure to pickle is reported like any other failure.
            answer = self._answers[number](pickle.loads(content))
            reply = asked, True, pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            reply = asked, False, describe(error)
        self._to_send.append((rank, _ANSWER, reply))


class Questions:
    """Asks other ranks, and answers them; see :meth:`mn_comm.CommunicatorBase.questions`.

    Args:
        desk: Answers the questions. Creating it is collective.
        answer: Returns this rank's answer to a question.
    """

    def __init__(self, desk: Desk, answer: Answer) -> None:
        self._desk = desk
        self._number = desk.open(answer)
        weakref.finalize(self, desk.close, self._number).atexit = False

    def ask(self, rank: int, question: Any) -> Any:
        """Return another rank's answer to a question; not collective.

        Args:
            rank: The rank, not this one.
            question: Anything that can be pickled.

        Raises:
            Exception: What the other rank's ``answer`` raised.
        """
        return self._desk.ask(rank, self._number, question)


_desks: weakref.WeakSet[Desk] = weakref.WeakSet()


def _stop_all() -> None:
    for desk in list(_desks):
        desk.stop()


def _start_all() -> None:
    for desk in list(_desks):
        desk.start()


def _forget_all() -> None:
    _desks.clear()  # a child process is not a rank


def _end() -> None:
    """End all threads, when all ranks end."""
    desks = [desk for desk in _desks if desk.is_open]
    if desks and not MPI.Is_finalized():
        waiting = [desk.ranks.Ibarrier() for desk in desks]
        # The stall monitor must not report this wait: another rank may run for a long time.
        while not MPI.Request.Testall(waiting):
            time.sleep(_MOST_PAUSE_SECONDS)
    _stop_all()


# Questions must be answered before MPI ends, which is finalized after this.
at_exit(_end)
around_forks(before=_stop_all, after_in_parent=_start_all, after_in_child=_forget_all)
