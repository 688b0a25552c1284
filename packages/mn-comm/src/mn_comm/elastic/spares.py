"""Processes that wait from the start and replace ranks that are lost; see docs/decisions/0015-spares.md.

All processes that train or wait are one *pool*, with a communicator of its own that is used for nothing but a *muster*:
the processes that train revoke it, which wakes those that wait. Then all of them shrink it, and split the result into
those that train and those that wait.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mn_comm.elastic import ends
from mn_comm.mpi import MPI

if TYPE_CHECKING:
    from mn_comm.elastic.family import Family
    from mn_comm.ranks import Ranks

__all__ = ["Mustered", "Pool"]

_PAUSE_SECONDS = 0.02  # between two looks: a third of a percent of a core
_LOOKS_UNTIL_COUNT = 25  # between two counts of those who are alive


class Member(NamedTuple):
    """What a process says at a muster.

    Attributes:
        rank: Its rank among those who train; -1 while it waits.
        generation: How often its communicator has been rebuilt.
        name: What it is called in messages.
    """

    rank: int
    generation: int
    name: str


class Mustered(NamedTuple):
    """What has come of a muster.

    Attributes:
        base: The communicator of those who train, or of those who wait, to which this process belongs.
        is_called: Whether it trains.
        generation: How often the communicator of those who train has been rebuilt.
        newcomers: The names of those who train now and have waited, in the order of their ranks, which are the last.
    """

    base: MPI.Intracomm
    is_called: bool
    generation: int
    newcomers: tuple[str, ...]


class Pool:
    """All processes that train or wait.

    Args:
        family: A family of all of them. It is given up.
        places: How many are to train.

    Attributes:
        waiting: How many were waiting after the last muster.
    """

    def __init__(self, family: Family, places: int) -> None:
        self._family = family
        self._places = places
        self._trainers = list(range(family.base.size))
        self.waiting = 0

    @property
    def base(self) -> Ranks:
        """The communicator of all of them."""
        return self._family.base

    def muster(self, rank: int, generation: int) -> Mustered | None:
        """Decide who trains from now on: those who did, then the first who wait; collective among all who are alive.

        Args:
            rank: The rank of this process among those who train, -1 if it waits.
            generation: How often its communicator has been rebuilt.

        Returns:
            What has come of it; ``None`` if the job is over. Then :attr:`is_abandoned` says how.
        """
        from mn_comm.elastic.recovery import attempt

        self._family.revoke()
        member = Member(rank, generation, f"process {MPI.COMM_WORLD.rank} ({MPI.Get_processor_name()})")
        while True:
            self._shrink()
            if self._family.all_leave(leaving=rank < 0):
                return None
            done = attempt(self._family, partial(_divide, member=member, places=self._places))
            if done is not None:
                found, self._trainers = done[0]
                self.waiting = self.base.size - len(self._trainers)
                return found

    def _shrink(self) -> None:
        from mn_comm.elastic.recovery import shrink, survivors

        before, self._family = self._family, shrink(self._family)
        alive = survivors(before.base, self._family.base)
        self._trainers = [new for new, old in enumerate(alive) if old in self._trainers]

    def dismiss(self) -> None:
        """Let those who wait end; to be called by all who train, once they have agreed to end."""
        from mn_comm.elastic.recovery import agree_to_leave

        self._family.revoke()
        agree_to_leave(self._family)

    @property
    def is_abandoned(self) -> bool:
        """Whether none is left that has trained."""
        return not self._trainers

    def wait(self) -> None:
        """Wait for the next muster, or until none is left that trains."""
        looks = 0
        while not self.base.Is_revoked() and not self.is_abandoned:
            looks += 1
            if looks % _LOOKS_UNTIL_COUNT == 0:
                self._count()
            if ends.asked_to_leave.is_set():
                ends.leave_as_asked()
            MPI.COMM_SELF.Iprobe()  # MPI notices nothing unless it is called
            time.sleep(_PAUSE_SECONDS)

    def _count(self) -> None:
        failed, all_of_it = self.base.Get_failed(), self.base.Get_group()
        dead = failed.Translate_ranks(range(failed.size), all_of_it)
        self._trainers = [each for each in self._trainers if each not in dead]
        failed.Free()
        all_of_it.Free()


def _divide(family: Family, member: Member, places: int) -> tuple[Mustered, list[int]]:
    """Split a pool; return what has come of it, and which of its ranks train. Collective."""
    ranks = family.base
    members = [Member(*each) for each in ranks.allgather(tuple(member))]
    order = sorted(range(len(members)), key=lambda each: (members[each].rank < 0, members[each].rank))
    trainers = order[:places]
    newcomers = tuple(members[each].name for each in trainers if members[each].rank < 0)
    is_called = ranks.rank in trainers
    base = ranks.split(int(not is_called), order.index(ranks.rank))
    return Mustered(base, is_called, max(each.generation for each in members), newcomers), trainers
