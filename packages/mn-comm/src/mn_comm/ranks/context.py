"""The MPI communicators that are derived from the caller's: created once, stored as its attribute, and freed with it.

All communicators and optimizers over it share them: an MPI library supports only a few thousand.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mn_comm.basis.guard import guard
from mn_comm.ranks.agreement import digest
from mn_comm.ranks.intracomm import Ranks
from mn_comm.ranks.shared_memory import SharedMemory
from mn_comm.ranks.topology import Topology, discover

if TYPE_CHECKING:
    from mn_comm.ranks.background import Worker


class Context:
    """The communicators of one thread: a private duplicate of the caller's, and some derived from it; collective.

    With ``is_apart``, a thread of the caller communicates with it, while the program's thread also communicates.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, is_apart: bool = False) -> None:
        self.is_apart = is_apart
        self.ranks = (mpi_comm if isinstance(mpi_comm, Ranks) else Ranks(mpi_comm)).duplicate()
        guard().watch(self.ranks)
        self.topology: Topology = discover(self.ranks)  # where its ranks run
        self.within, self.across = self.ranks.by_node(self.topology)
        self.memory = SharedMemory(self.within)  # which the ranks of this node share
        self.numbers = itertools.count(1)  # for objects that all ranks create in the same order
        # Whether NCCL may be used; its calls do not return when a rank is lost.
        self.may_use_devices = type(self.ranks) is Ranks

    def free(self) -> None:
        """Free the communicators; collective."""
        guard().leave(self.ranks)
        for ranks in (self.within, self.across, self.ranks):
            if ranks.on_devices is not None:
                ranks.on_devices.destroy()
            ranks.Free()


class Contexts:
    """All contexts that are derived from one MPI communicator; ``foreground`` is that of the main thread."""

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self.foreground = Context(mpi_comm)
        guard().settled(self.foreground.within)
        self._splits: dict[int, Ranks] = {}
        self._n_users: Counter[int] = Counter()
        self._mpi_comm = mpi_comm
        self._background: tuple[Context, Worker] | None = None
        self._others: list[Context] = []
        self._given_back: set[int] = set()

    @property
    def background(self) -> tuple[Context, Worker]:
        """The thread that averages gradients in the background, with its context; collective at first use."""
        if self._background is None:
            from mn_comm.ranks.background import Worker

            self._background = Context(self._mpi_comm), Worker()
        return self._background

    def another(self) -> Context:
        """Return a context for one more thread, which nothing else uses until it is given back; collective."""
        number = self._given_back_everywhere()
        if number is None and self._others:
            gc.collect()  # its user may already have been garbage-collected
            number = self._given_back_everywhere()
        if number is None:
            number = len(self._others)
            self._others.append(Context(self._mpi_comm, is_apart=True))
        self._given_back.discard(number)
        return self._others[number]

    def give_back(self, context: Context) -> None:
        """Make a context from :meth:`another` available again once all ranks have given it back; not collective."""
        if context in self._others:
            self._given_back.add(self._others.index(context))

    def _given_back_everywhere(self) -> int | None:
        """Return the first additional context that no rank uses any more; collective."""
        found: list[set[int]] = self.foreground.ranks.allgather(self._given_back)
        return min(set.intersection(*found), default=None)

    def split(self, color: int, key: int) -> Ranks:
        """Return the ranks of equal color, ordered by key; collective.

        If the ranks were split into the same groups before, this returns the same communicator, unless it was freed:
        by :meth:`release`, or by the caller, who may do so in some groups only.
        """
        ranks = self.foreground.ranks
        found = sorted((*each, rank) for rank, each in enumerate(ranks.allgather((color, key))))
        # Not the groups themselves, which name every rank.
        groups = digest([[rank for *_, rank in group] for _, group in itertools.groupby(found, itemgetter(0))])
        is_missing = self._splits.get(groups, MPI.COMM_NULL) == MPI.COMM_NULL
        if ranks.any(is_missing):
            made = ranks.split(color if is_missing else MPI.UNDEFINED, key)
            if is_missing:
                self._splits[groups] = made
                self._n_users[groups] = 0
        self._n_users[groups] += 1
        return self._splits[groups]

    def release(self, part: MPI.Intracomm) -> None:
        """Free a communicator from :meth:`split` if all who got it have released it; collective among its ranks."""
        for groups, kept in self._splits.items():
            if kept is part:
                self._n_users[groups] -= 1
                if self._n_users[groups] <= 0:
                    del self._splits[groups], self._n_users[groups]
                    if part != MPI.COMM_NULL:
                        kept.Free()
                return

    def abandon(self) -> None:
        """End the thread when all communicators were revoked, so that its operations fail; not collective."""
        if self._background is not None:
            self._background[1].close()

    def free(self) -> None:
        """End the thread and free all communicators; collective."""
        if self._background is not None:
            context, worker = self._background
            worker.close()
            context.free()
            self._background = None
        for context in self._others:
            context.free()
        self._others.clear()
        self._given_back.clear()
        for ranks in self._splits.values():
            if ranks != MPI.COMM_NULL:
                ranks.Free()
        self.foreground.free()


def contexts_of(mpi_comm: MPI.Intracomm) -> Contexts:
    """Return the contexts that are derived from an MPI communicator; collective at first use."""
    found: Any = mpi_comm.Get_attr(_keyval())
    contexts: Contexts = found or Contexts(mpi_comm)
    if found is None:
        mpi_comm.Set_attr(_keyval(), contexts)
    return contexts


@functools.cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval(delete_fn=lambda _comm, _keyval, contexts: contexts.free())
