"""Processes that wait from the start and replace ranks that are lost; see docs/decisions/0015-spares.md.

All processes that train or wait form a *pool*. It has its own communicator, which is used only for a *muster*: the
processes that train revoke the communicator, which wakes the processes that wait. All of them then shrink it, and split
the result into the processes that train and those that wait.
"""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

from mn_comm.basis.mpi import MPI
from mn_elastic import ends
from mn_elastic.family import Family
from mn_elastic.recovery import attempt, shrink, survivors

_PAUSE_SECONDS = 0.02  # between two polls; polling takes a third of a percent of a core
_LOOKS_UNTIL_COUNT = 25  # polls between two counts of the processes that are alive


class Member(NamedTuple):
    """What a process reports at a muster.

    Attributes:
        rank: Its rank among the processes that train; -1 while it waits.
        generation: How often its communicator has been rebuilt.
        name: Its name in messages.
    """

    rank: int
    generation: int
    name: str


class Mustered(NamedTuple):
    """The result of a muster for one process.

    Attributes:
        base: The communicator to which this process belongs: that of the processes that train, or of those that wait.
        is_called: Whether this process trains.
        generation: How often the communicator of the processes that train has been rebuilt.
        newcomers: The names of the processes that have waited and train now. They are the last ranks, in this order.
    """

    base: MPI.Intracomm
    is_called: bool
    generation: int
    newcomers: tuple[str, ...]


class Pool:
    """All processes that train or wait.

    Args:
        family: A family of all of them. The first muster gives it up.
        places: How many of them train, if enough are alive.

    Attributes:
        family: The family after the last muster; if the job is over, it tells whether a process that trained failed.
        waiting: How many of them were waiting after the last muster.
    """

    def __init__(self, family: Family, places: int) -> None:
        self.family = family
        self._places = places
        self._trainers = list(range(family.base.size))
        self.waiting = 0

    def muster(self, rank: int, generation: int) -> Mustered | None:
        """Decide which processes train from now on; collective among all that are alive.

        The places go to the processes that have trained, by rank, and then to the first of those that wait.

        Args:
            rank: The rank of this process among those that train; -1 if it waits.
            generation: How often its communicator has been rebuilt.

        Returns:
            The result; ``None`` if the job is over.
        """
        self.family.revoke()
        member = Member(rank, generation, f"process {MPI.COMM_WORLD.rank} ({MPI.Get_processor_name()})")
        while True:
            self._shrink()
            if self.family.all_leave(leaving=rank < 0):
                return None
            divided = attempt(self.family, partial(_divide, member=member, places=self._places))
            if divided is not None:
                found, self._trainers = divided
                self.waiting = self.family.base.size - len(self._trainers)
                return found

    def _shrink(self) -> None:
        before, self.family = self.family, shrink(self.family)
        alive = survivors(before.base, self.family.base)
        self._trainers = [new for new, old in enumerate(alive) if old in self._trainers]

    def dismiss(self, *, failed: bool) -> None:
        """Let the waiting processes end; all processes that train must call this, once they have agreed to end.

        Args:
            failed: Whether this process ends because of a failure.
        """
        self.family.revoke()
        self._shrink()
        while not self.family.all_leave(leaving=True, failed=failed):  # a process has died meanwhile
            self.family.give_up()
            self._shrink()

    @property
    def is_abandoned(self) -> bool:
        """Whether all processes that trained are dead."""
        return not self._trainers

    def wait(self) -> None:
        """Wait until the next muster begins, or all processes that train are dead."""
        looks = 0
        while not self.family.base.Is_revoked() and not self.is_abandoned:
            looks += 1
            if looks % _LOOKS_UNTIL_COUNT == 0:
                self._count()
            if ends.asked_to_leave.is_set():
                ends.leave_as_asked()
            MPI.COMM_SELF.Iprobe()  # MPI notices nothing unless it is called
            time.sleep(_PAUSE_SECONDS)

    def _count(self) -> None:
        failed, all_of_it = self.family.base.Get_failed(), self.family.base.Get_group()
        dead = failed.Translate_ranks(range(failed.size), all_of_it)
        self._trainers = [each for each in self._trainers if each not in dead]
        failed.Free()
        all_of_it.Free()


def _divide(family: Family, member: Member, places: int) -> tuple[Mustered, list[int]]:
    """Split a pool; return the result of the muster, and which ranks of the pool train. Collective."""
    ranks = family.base
    members = [Member(*each) for each in ranks.allgather(tuple(member))]
    order = sorted(range(len(members)), key=lambda each: (members[each].rank < 0, members[each].rank))
    trainers = order[:places]
    newcomers = tuple(members[each].name for each in trainers if members[each].rank < 0)
    is_called = ranks.rank in trainers
    base = ranks.split(int(not is_called), order.index(ranks.rank))
    return Mustered(base, is_called, max(each.generation for each in members), newcomers), trainers
