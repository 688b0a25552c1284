"""Messages between the stall monitors of neighboring ranks.

A rank that has stalled asks the next rank what it is doing. That rank answers that it is alive, prints what it is
doing, and asks the next one. A rank that does not answer is reported; a rank that reaches the end of its program
informs its neighbors. The messages use the private duplicates, with separate tags, and need MPI_THREAD_MULTIPLE.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from mn_comm.basis.mpi import MPI
from mn_guard import patience

_QUESTION, _ANSWER, _FAREWELL = range(32764, 32767)  # MPI guarantees tags up to 32767; collectives use 0

_PAUSE_SECONDS = 0.001


class StallProbe:
    """The messages of one process's monitor.

    Args:
        patience: For how many seconds to wait for an answer.

    Attributes:
        joined: The private communicators on which it asks and answers.
        finished: The ranks, numbered as in ``MPI_COMM_WORLD``, that have reached the end of their program, and when
            they reported it.
        leaving: Others that have answered that they have reached it, and only wait until the others have as well; and
            when they answered.
        is_leaving: Whether this rank is one of these.
    """

    def __init__(self, patience: float) -> None:
        self.joined: list[MPI.Intracomm] = []
        self.finished: dict[int, float] = {}
        self.leaving: dict[int, float] = {}
        self.is_leaving = False
        self._farewells: set[tuple[int, int]] = set()
        self._patience = patience
        self._can_ask = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self._sent: list[MPI.Request] = []
        self._unanswered: dict[int, float] = {}

    def ask(self, ranks: MPI.Intracomm | None, about: int | None = None) -> None:
        """Ask the next rank what it is doing, unless that rank is the one that asks.

        Args:
            ranks: One of :attr:`joined`; for any other ranks, nothing is done.
            about: The rank that wants to know; ``None`` for this one.
        """
        if ranks is None or not self._can_ask or ranks not in self.joined:
            return
        about = ranks.rank if about is None else about
        neighbor = (ranks.rank + 1) % ranks.size
        if neighbor != about:
            self._send(ranks, neighbor, _QUESTION, about)
            self._unanswered.setdefault(in_world(ranks)[neighbor], time.monotonic())

    def answer(self, tell: Callable[[int], bool]) -> None:
        """Answer questions that have arrived, and receive answers.

        Args:
            tell: Prints what this rank is doing. It is called with the rank that asks, as ``MPI_COMM_WORLD`` numbers
                them, and returns whether to ask the next rank as well.
        """
        if not self._can_ask:
            return
        for ranks in list(self.joined):
            try:
                self._answer_on(ranks, tell)
            except MPI.Exception:  # it was revoked because a rank was lost
                self.joined.remove(ranks)

    def _answer_on(self, ranks: MPI.Intracomm, tell: Callable[[int], bool]) -> None:
        for source, about in self._received(ranks, _QUESTION):
            self._send(ranks, source, _ANSWER, int(self.is_leaving))
            if tell(in_world(ranks)[about]):
                self.ask(ranks, about)
        for source, is_leaving in self._received(ranks, _ANSWER):
            self._unanswered.pop(in_world(ranks)[source], None)
            if is_leaving:
                self.leaving.setdefault(in_world(ranks)[source], time.monotonic())
        self._hear_farewells(ranks)

    def silent(self) -> list[int]:
        """Return the ranks that have not answered in time, each only once, as ``MPI_COMM_WORLD`` numbers them."""
        late = [rank for rank, asked in self._unanswered.items() if time.monotonic() - asked > self._patience]
        for rank in late:
            del self._unanswered[rank]
        return late

    def say_farewell(self) -> None:
        """Tell the neighbors that this rank takes part in nothing any more, and receive the same message from them.

        If a message is not received, UCX writes a warning about it. So a rank waits a moment for its neighbors, as it
        would in ``MPI_Finalize``, and sends nothing to one that has waited long enough.
        """
        if self._can_ask and not MPI.Is_finalized():
            with contextlib.suppress(MPI.Exception):  # one of them has died
                self._exchange_farewells()

    def _exchange_farewells(self) -> None:
        begin, expected = time.monotonic(), set()
        for ranks in self.joined:
            for neighbor in {(ranks.rank + step) % ranks.size for step in (-1, 1)} - {ranks.rank}:
                expected.add((id(ranks), neighbor))
                if begin - self.finished.get(in_world(ranks)[neighbor], begin) < patience.FAREWELL:
                    self._send(ranks, neighbor, _FAREWELL, ranks.rank)
        while not expected <= self._farewells and time.monotonic() - begin < patience.FAREWELL:
            for ranks in self.joined:
                self._hear_farewells(ranks)
            time.sleep(_PAUSE_SECONDS)

    def _hear_farewells(self, ranks: MPI.Intracomm) -> None:
        for source, _ in self._received(ranks, _FAREWELL):
            self._farewells.add((id(ranks), source))
            self.finished.setdefault(in_world(ranks)[source], time.monotonic())

    def _send(self, ranks: MPI.Intracomm, to: int, tag: int, what: int) -> None:
        # Do not wait for it: a rank that has stalled or ended may never receive it.
        self._sent.append(ranks.Isend(np.array([what], np.int64), to, tag))

    def _received(self, ranks: MPI.Intracomm, tag: int) -> Iterator[tuple[int, int]]:
        status = MPI.Status()
        while ranks.Iprobe(MPI.ANY_SOURCE, tag, status):
            what = np.zeros(1, np.int64)
            MPI.Intracomm.Recv(ranks, what, status.source, tag)  # not a wait: the message has arrived
            yield status.source, int(what[0])


def in_world(ranks: MPI.Intracomm) -> list[int]:
    """Return the numbers in ``MPI_COMM_WORLD`` of the ranks of a communicator."""
    return ranks.group.Translate_ranks(None, MPI.COMM_WORLD.group)
