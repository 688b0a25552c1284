"""From one generation to the next: shrink, build and vote, and repeat this if another rank dies meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from mpi4py import MPI

from mn_comm.ranks.watch import activity
from mn_elastic.family import Family, Overruled

_T = TypeVar("_T")


def next_generation(family: Family, build: Callable[[Family], _T]) -> tuple[Family, _T]:
    """Return the family of the ranks that are alive, and the result of ``build`` for it; collective among these ranks.

    Args:
        family: The family that every rank has given up.
        build: Creates everything that depends on the family; collective, and called again for the next family if a rank
            dies.
    """
    while True:
        family = shrink(family)
        family.all_leave(leaving=False)
        built = attempt(family, build)
        if built is not None:
            return family, built


def first_generation(base: MPI.Intracomm, build: Callable[[Family], _T]) -> tuple[Family, _T]:
    """Return a family of the ranks of a new communicator, or of those that are alive; collective.

    Args:
        base: The communicator.
        build: Creates everything that depends on the family; see :func:`next_generation`.
    """
    family = Family(base)
    built = attempt(family, build)
    return (family, built) if built is not None else next_generation(family, build)


def attempt(family: Family, build: Callable[[Family], _T]) -> _T | None:
    """Return the result of ``build``, which is not ``None``; ``None`` on every rank if a rank was lost; collective."""
    try:
        built = build(family)
        family.vote(approve=True)
    except Overruled:
        return None
    except Exception as error:
        if error is family.interruption or not (isinstance(error, MPI.Exception) or family.is_broken):
            raise  # the exception is raised on every rank: it concerns what the ranks have in common
        family.give_up()
        return None
    return built


def all_leave(family: Family, *, at_once: bool, failed: bool) -> tuple[bool, bool]:
    """Leave the other ranks, which then recover; return whether no rank continues, and whether a rank has failed.

    This rank takes part in their next vote, and waits for it.

    Args:
        family: The current family.
        at_once: Whether to interrupt ranks that wait for this rank, because it will not send anything.
        failed: Whether this rank leaves because of a failure.
    """
    if at_once:
        family.revoke()
    with contextlib.suppress(Overruled):
        family.vote(approve=False)
    family = shrink(family)
    return family.all_leave(leaving=True, failed=failed), family.has_failed


def survivors(before: MPI.Intracomm, after: MPI.Intracomm) -> tuple[int, ...]:
    """Return which ranks of one communicator are in a later one, in the order of the later one."""
    found = after.group.Translate_ranks(range(after.size), before.group)
    return tuple(each for each in found if each != MPI.UNDEFINED)


def shrink(family: Family) -> Family:
    """Return a family of the ranks that are alive; collective among these."""
    shrunk: Any = activity().wait_for(MPI.Comm.Shrink, "Shrink", family.base, (family.base,))
    return Family(shrunk)
