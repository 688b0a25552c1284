"""From one generation to the next: shrink, build and vote, and repeat this if another rank dies meanwhile."""

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
    """Return the family of the ranks that are alive, and the result of ``build`` for it; collective among these ranks.

    Args:
        family: The family that every rank has given up.
        build: Creates everything that depends on the family; collective, and called again for the next family if a rank
            dies.
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
                raise  # the exception is raised on every rank: it concerns what the ranks have in common
            family.give_up()
            continue
        return family, built


def all_leave(family: Family, *, at_once: bool) -> bool:
    """Leave the other ranks, which then recover; return whether no rank continues.

    It takes part in their next vote, and waits for it.

    Args:
        family: The current family.
        at_once: Whether to interrupt ranks that wait for this rank, because it will not send anything.
    """
    if at_once:
        family.revoke()
    with contextlib.suppress(Overruled):
        family.vote(approve=False)
    return Family(_shrink(family)).all_leave(leaving=True)


def survivors(before: Family, after: Family) -> tuple[int, ...]:
    """Return which ranks of one family are in a later one, in the order of the later one."""
    members = range(after.base.size)
    return tuple(after.base.group.Translate_ranks(list(members), before.base.group))


def _shrink(family: Family) -> MPI.Intracomm:
    shrunk: Any = activity().wait_for(MPI.Comm.Shrink, "Shrink", family.base, (family.base,))
    return shrunk  # type: ignore[no-any-return]
