"""The MPI communicators of one generation, and the votes by which its ranks decide whether to continue with it.

It knows all communicators derived from the base, so that a revocation reaches them all. There is one stream of votes,
on the base: a rank that fails votes against, once, in the next vote of the others. The first vote that is not unanimous
is the last vote of the family, on every rank.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mn_comm.ranks.intracomm import Ranks
from mn_comm.ranks.watch import activity
from mn_guard import stall

if TYPE_CHECKING:
    from collections.abc import Callable

    from mn_comm.ranks.topology import Topology

_AGREE = MPI.Comm.Agree
_LEAVES, _SUCCEEDS = 1, 2  # bits of a number of which MPI_Comm_agree returns those that all ranks have set


class Overruled(Exception):
    """A vote was not unanimous: every rank gives up the family."""


class Family:
    """The MPI communicators of one generation.

    Args:
        mpi_comm: The base. It is used for votes, to derive other communicators, and for the script's own messages.

    Attributes:
        base: The base.
        is_over: Whether a vote was lost.
        interruption: What a signal handler of the script has raised in the last vote.
        is_torn: Whether this rank is in a vote, or has left it without knowing the result.
        has_failed: Whether a rank that leaves has failed; known after :meth:`all_leave`.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self.base = ElasticRanks(mpi_comm)
        self.base.family = self
        self.is_over = self.is_torn = False
        self.interruption: BaseException | None = None
        self.has_failed = False
        self._known = [self.base]

    def vote(self, *, approve: bool) -> None:
        """Return if every rank approves and no rank has died; collective.

        Args:
            approve: Whether this rank has succeeded.

        Raises:
            Overruled: A rank disapproves or has died; raised on every rank.
        """
        if self.is_over:
            raise Overruled
        # Twice, as Open MPI 5.0.11 sometimes returns 0 on all ranks although all have passed 1, while a thread averages
        # in the background (3 of some 1,500 votes). All ranks see the same, so all vote again.
        self.interruption, self.is_torn = None, True
        self.is_over = not any(self._agree(int(approve)) for _ in range(2))
        self.is_torn = False
        self._raise_interruption()
        if self.is_over:
            raise Overruled

    def _agree(self, bits: int) -> int | None:
        """Return the bits that all ranks have set, or ``None`` if a rank has died; collective.

        What a signal handler has raised is kept, so that the result is not lost.
        """
        results: list[int] = []
        try:
            # The result is the same on all ranks, also the exception, because no rank acknowledges failures. This works
            # on a revoked communicator, too. No handler can run between the end of the vote and the list.
            vote = map(_AGREE, (self.base,), (bits,))
            activity().wait_for(results.extend, "Agree", self.base, (vote,))
        except MPI.Exception:
            pass
        except BaseException as error:
            self.interruption = error
            if not results and not isinstance(error.__context__, MPI.Exception):  # the result is not known
                raise
        return results[0] if results else None

    def _raise_interruption(self) -> None:
        if self.interruption is not None:
            raise self.interruption

    def all_leave(self, *, leaving: bool, failed: bool = False) -> bool:
        """Return whether no rank will continue; collective, the first operation in a new family.

        Args:
            leaving: Whether this rank will not continue. If others will, it then ends, and they notice.
            failed: Whether this rank leaves because of a failure.
        """
        agreed = self._agree(_LEAVES * leaving | _SUCCEEDS * (not failed))
        self._raise_interruption()
        if agreed is None:
            return False
        self.has_failed = not agreed & _SUCCEEDS
        return bool(agreed & _LEAVES)

    def give_up(self) -> None:
        """Revoke all communicators, and vote against continuing; collective with the other ranks' next vote."""
        self.revoke()
        with contextlib.suppress(Overruled):
            self.vote(approve=False)

    def revoke(self) -> None:
        """Make all operations that wait on any of the communicators fail, on every rank."""
        for ranks in self._known:
            stall.leave(ranks)
            with contextlib.suppress(MPI.Exception):
                ranks.Revoke()

    @property
    def is_broken(self) -> bool:
        """Whether a rank has given up or died, as far as this rank knows.

        Then an exception of any class may be a consequence: Open MPI 5.0.11 sometimes returns from a collective
        operation without an error, but also without the data of a rank that died (3 of 50 ``allgather``).
        """
        return self.is_over or any(ranks.Is_revoked() for ranks in self._known) or self.has_dead_ranks

    @property
    def has_dead_ranks(self) -> bool:
        """Whether a rank has died, as far as this rank knows."""
        dead: Any = self.base.Get_failed()
        count: int = dead.size
        dead.Free()
        return count > 0

    def adopt(self, derive: Callable[[], Any]) -> ElasticRanks:
        """Return a derived communicator as soon as every rank has it; collective.

        Without this vote, a rank might wait on it for a rank that could not create it, and so cannot revoke it.

        Raises:
            Overruled: Another rank does not have it.
            MPI.Exception: This rank does not have it.
        """
        ranks = ElasticRanks(derive())
        ranks.family = self
        self._known.append(ranks)
        self.vote(approve=True)
        return ranks


class ElasticRanks(Ranks):
    """Ranks that belong to a family, to which all ranks derived from them belong as well."""

    family: Family

    def duplicate(self) -> Ranks:
        """Return a communicator of the same ranks; collective."""
        return self.family.adopt(self.Dup)

    def by_node(self, topology: Topology) -> tuple[Ranks, Ranks]:
        """Do what :meth:`Ranks.by_node` does, with as few new communicators as possible.

        Open MPI 5.0.11 crashes if a rank dies while the others create a communicator.
        """
        if topology.inter_size == 1:
            return self, Ranks(MPI.COMM_SELF)
        return super().by_node(topology)

    def split(self, color: int, key: int) -> Ranks:
        """Split the ranks into groups of equal color, ordered by key; collective."""
        return self.family.adopt(lambda: self.Split(color, key))
