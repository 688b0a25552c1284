"""Which rank owns which parameter: whole parameters, the largest first, each to the rank with the fewest bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """A parameter that needs an owner.

    Attributes:
        nbytes: A number of bytes to which the size of its state is proportional.
        is_frozen: Whether it is currently not updated, so that it has no state yet.
    """

    nbytes: int
    is_frozen: bool


def assign(
    items: Mapping[str, Item], groups: Iterable[Iterable[str]], n_ranks: int, kept: Mapping[str, int]
) -> dict[str, int]:
    """Return the rank that owns each parameter.

    Args:
        items: The parameters, by name.
        groups: Names of parameters that must have the same owner.
        n_ranks: How many ranks there are.
        kept: Previous owners, which do not change, so that little state has to be moved.
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
    """Return the sort key of a group: first those with an owner, then those that are updated, the largest first."""
    is_new = not any(name in kept for name in group)
    is_frozen = all(items[name].is_frozen for name in group)
    return is_new, is_frozen, -sum(items[name].nbytes for name in group), group[0]


def join_groups(groups: Iterable[Iterable[str]]) -> list[list[str]]:
    """Return disjoint groups: groups with a common name are joined. Groups and names are sorted."""
    group_of: dict[str, set[str]] = {}
    for group in groups:
        joined: set[str] = set()
        for name in group:
            joined |= group_of.get(name, {name})
        for name in joined:
            group_of[name] = joined
    found = {min(group): sorted(group) for group in group_of.values()}
    return [found[name] for name in sorted(found)]
