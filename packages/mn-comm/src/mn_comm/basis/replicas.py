"""Objects that make the ranks' copies of a parameter equal again, if these may differ temporarily.

An optimizer declares itself the owner of the parameters that it trains. Code that evaluates or saves them first asks
their owners to synchronise them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from mn_comm.basis.protocols import Model

__all__ = ["Owner", "own", "synchronize_replicas"]


class Owner(Protocol):
    """An object that can make all ranks' parameters equal."""

    def synchronize(self) -> None:
        """Make all ranks' parameters equal; collective."""
        ...


# By the parameter's id, because parameters may not be hashable; with the parameter, to check that it is still the same
# one.
_owners: dict[int, tuple[weakref.ref[Any], weakref.ref[Owner]]] = {}


def own(owner: Owner, params: Iterable[Any]) -> None:
    """Declare the owner of some parameters; not collective, but every rank should call it.

    Args:
        owner: The owner. Only a weak reference to it is kept.
        params: The parameters; previous owners no longer own them.
    """
    for param in params:
        key = id(param)
        _owners[key] = (weakref.ref(param, lambda ref, key=key: _forget(key, ref)), weakref.ref(owner))  # type: ignore[misc]


def synchronize_replicas(model: Model) -> None:
    """Make a model's parameters equal on all ranks, through their owners; collective.

    Args:
        model: The model, or a part of one.
    """
    owners: list[Owner] = []
    for _, param in sorted(model.namedparams(), key=lambda named: named[0]):
        known, owner = _owners.get(id(param), (None, None))
        found = owner() if owner is not None and known is not None and known() is param else None
        if found is not None and not any(found is each for each in owners):
            owners.append(found)
    for each in owners:
        each.synchronize()


def _forget(key: int, ref: weakref.ref[Any]) -> None:
    if key in _owners and _owners[key][0] is ref:
        del _owners[key]
