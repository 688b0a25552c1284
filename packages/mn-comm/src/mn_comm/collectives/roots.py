"""The root of a collective: one rank, the same on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mn_comm.basis import wire
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["same_root"]


def same_root(ranks: Ranks, root: Any, prepare: Callable[[int], object] = lambda root: None) -> int:
    """Return the root as an int; collective.

    Without this check, ranks with different roots would wait forever, or each take its own array for the root's. It is
    one reduction together with what else has to be checked, by ``prepare``: a rank that is interrupted while it waits
    for the others should not have to meet them again. ``prepare`` gets the root, and must not communicate.

    Raises:
        TypeError: It is not an integer on some rank (on every rank).
        ValueError: It is out of range on some rank, or the ranks differ (on every rank).
        Exception: What ``prepare`` raised, here or on another rank.
    """

    def check() -> int:
        number = wire.check_rank(root, ranks.size, "root")
        prepare(number)
        return number

    return agreement.agree(ranks, check, lambda roots: agreement.difference_of("root", roots))
