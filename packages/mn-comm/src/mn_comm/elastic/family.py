"""The MPI communicators of one generation, and the votes by which its ranks decide whether they go on with it.

All that is derived from the base is known here, so that a revocation reaches it. There is one stream of votes, on the
base: a rank that fails votes against, once, wherever the others vote next. The first vote that is not unanimous is the
last one of the family, on every rank.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mn_comm import stall
from mn_comm.ranks import Ranks
from mn_comm.watch import activity

if TYPE_CHECKING:
    from collections.abc import Callable

    from mn_comm.topology import Topology

_AGREE = MPI.Comm.Agree

__all__ = ["ElasticRanks", "Family", "Overruled"]


class Overruled(Exception):
    """A vote was not unanimous: the family is given up on every rank."""


class Family:
    """The MPI communicators of one generation.

    Args:
        mpi_comm: The base. It is used for votes, for deriving others, and for the script's own messages.

    Attributes:
        base: The base.
        is_over: Whether a vote was lost.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self.base = ElasticRanks(mpi_comm)
        self.base.family = self
        self.is_over = False
        self._known = [self.base]

    def vote(self, *, approve: bool) -> None:
        """Return if every rank approves and none has died; collective.

        Args:
            approve: Whether this rank has come through.

        Raises:
            Overruled: A rank disapproves, or has died. So it is on every rank.
        """
        if self.is_over:
            raise Overruled
        try:
            # Uniform, the exception as well: nobody acknowledges failures. Works on a revoked communicator, too.
            agreed = activity().wait_for(_AGREE, "Agree", self.base, (self.base, int(approve)))
        except MPI.Exception:
            agreed = 0
        if not agreed:
            self.is_over = True
            raise Overruled

    def all_leave(self, *, leaving: bool) -> bool:
        """Return whether no rank is going to go on; collective, first thing in a new family.

        Args:
            leaving: Whether this one is not. If others are going on, it then ends, and they notice.
        """
        try:
            return bool(activity().wait_for(MPI.Comm.Agree, "Agree", self.base, (self.base, int(leaving))))
        except MPI.Exception:
            return False

    def give_up(self) -> None:
        """Revoke all, and vote against going on; collective with the other ranks' next vote."""
        self.revoke()
        with contextlib.suppress(Overruled):
            self.vote(approve=False)

    def revoke(self) -> None:
        """Let whatever waits on any of the communicators fail, on every rank."""
        for ranks in self._known:
            stall.leave(ranks)
            with contextlib.suppress(MPI.Exception):
                ranks.Revoke()

    @property
    def is_revoked(self) -> bool:
        """Whether some rank has given up, as far as this one knows."""
        return self.is_over or any(ranks.Is_revoked() for ranks in self._known)

    def adopt(self, derive: Callable[[], Any]) -> ElasticRanks:
        """Return a derived communicator, once every rank has it; collective.

        Without the vote a rank might wait on it for one that could not make it, and so cannot revoke it.

        Raises:
            Overruled: A rank has not.
            MPI.Exception: This one has not.
        """
        ranks = ElasticRanks(derive())
        ranks.family = self
        self._known.append(ranks)
        self.vote(approve=True)
        return ranks


class ElasticRanks(Ranks):
    """Ranks that belong to a family, and so do all that are derived from them."""

    family: Family

    def duplicate(self) -> Ranks:
        """Return a communicator of the same ranks; collective."""
        return self.family.adopt(self.Dup)

    def by_node(self, topology: Topology) -> tuple[Ranks, Ranks]:
        """Do what :meth:`Ranks.by_node` does, with as few new communicators as can be.

        Open MPI 5.0.11 crashes if a rank dies while the others are making one.
        """
        if topology.inter_size == 1:
            return self, Ranks(MPI.COMM_SELF)
        return super().by_node(topology)

    def split(self, color: int, key: int) -> Ranks:
        """Split the ranks into groups of equal color, ordered by key; collective."""
        return self.family.adopt(lambda: self.Split(color, key))
