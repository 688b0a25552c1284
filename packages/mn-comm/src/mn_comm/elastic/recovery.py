"""From one generation to the next: shrink, build, vote; and again if somebody dies meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from mpi4py import MPI

from mn_comm.elastic.family import Family, Overruled
from mn_comm.watch import activity

__all__ = ["all_leave", "next_generation", "survivors"]

_T = TypeVar("_T")


def next_generation(family: Family, build: Callable[[Family], _T]) -> tuple[Family, _T]:
    """Return the family of the ranks that are alive, and what was built on it; collective among those.

    Args:
        family: The one that is given up, on every rank.
        build: Makes what is needed; collective, and called again on the next family if a rank dies in it.
    """
    while True:
        family = Family(_shrink(family))
        family.all_leave(leaving=False)
        try:
            built = build(family)
            family.vote(approve=True)
        except Overruled:
            continue
        except Exception as error:
            if not isinstance(error, MPI.Exception) and not family.is_revoked:
                raise  # on every rank: it is about what they have in common
            family.give_up()
            continue
        return family, built


def all_leave(family: Family, *, at_once: bool) -> bool:
    """Take leave of the others, who then recover; return whether there are none who go on.

    It takes part in their next vote, and waits for that.

    Args:
        family: The present one.
        at_once: Whether those who wait for this rank need not: it is not going to send anything.
    """
    if at_once:
        family.revoke()
    with contextlib.suppress(Overruled):
        family.vote(approve=False)
    return Family(_shrink(family)).all_leave(leaving=True)


def survivors(before: Family, after: Family) -> tuple[int, ...]:
    """Return which ranks of one family are in a later one, in the order of the latter."""
    members = range(after.base.size)
    return tuple(after.base.group.Translate_ranks(list(members), before.base.group))


def _shrink(family: Family) -> MPI.Intracomm:
    shrunk: Any = activity().wait_for(MPI.Comm.Shrink, "Shrink", family.base, (family.base,))
    return shrunk  # type: ignore[no-any-return]
