"""Which rank owns which parameter: whole parameters, the largest first, each to the rank that has fewest bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Item", "assign", "join_groups"]


class Item(NamedTuple):
    """A parameter to be given an owner.

    Attributes:
        nbytes: How many bytes its state is in proportion to.
        is_frozen: Whether it is not being updated now, so that it has no state yet.
    """

    nbytes: int
    is_frozen: bool


def assign(
    items: Mapping[str, Item], groups: Iterable[Iterable[str]], n_ranks: int, kept: Mapping[str, int]
) -> dict[str, int]:
    """Return the rank that owns each parameter.

    Args:
        items: The parameters, by name.
        groups: Names of those that must have the same owner.
        n_ranks: How many ranks there are.
        kept: Owners from before, which stay, so that little state has to move.
    """
    owners: dict[str, int] = {}
    loads = [0] * n_ranks
    joined = join_groups([*groups, *([name] for name in items)])
    known = [[name for name in group if name in items] for group in joined]
    for group in sorted(filter(None, known), key=lambda group: _rank_of(group, items, kept)):
        before = [kept[name] for name in group if name in kept]
        owner = before[0] if before else loads.index(min(loads))
        loads[owner] += sum(items[name].nbytes for name in group)
        owners.update(dict.fromkeys(group, owner))
    return owners


def _rank_of(group: Sequence[str], items: Mapping[str, Item], kept: Mapping[str, int]) -> tuple[bool, bool, int, str]:
    """Return what groups are sorted by: those with an owner, those that are updated, and of these the largest first."""
    is_new = not any(name in kept for name in group)
    is_frozen = all(items[name].is_frozen for name in group)
    return is_new, is_frozen, -sum(items[name].nbytes for name in group), group[0]


def join_groups(groups: Iterable[Iterable[str]]) -> list[list[str]]:
    """Return groups of which no two have a name in common; those that have become one. All are sorted by name."""
    group_of: dict[str, set[str]] = {}
    for group in groups:
        joined: set[str] = set()
        for name in group:
            joined |= group_of.get(name, {name})
        for name in joined:
            group_of[name] = joined
    found = {min(group): sorted(group) for group in group_of.values()}
    return [found[name] for name in sorted(found)]
