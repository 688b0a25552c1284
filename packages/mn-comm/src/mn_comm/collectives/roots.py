"""The root of a collective: one rank, the same on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mn_comm.basis import wire
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["same_root"]


def same_root(ranks: Ranks, root: Any) -> int:
    """Return the root as an int; collective.

    Without this check, ranks with different roots would wait forever, or each take its own array for the root's.

    Raises:
        TypeError: It is not an integer on some rank (on every rank).
        ValueError: It is out of range on some rank, or the ranks differ (on every rank).
    """
    return agreement.the_same(ranks, "root", lambda: wire.check_rank(root, ranks.size, "root"))
