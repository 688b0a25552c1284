"""Objects that make the ranks' copies of a parameter equal again, if these may differ temporarily.

An optimizer registers itself for the parameters that it trains. Code that evaluates or saves them first lets it
synchronise them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from mn_comm.basis.protocols import Model


class Synchronizer(Protocol):
    """An object that can make all ranks' parameters equal."""

    def synchronize(self) -> None:
        """Make all ranks' parameters equal; collective."""


# By the parameter's id, as it may not be hashable; with the parameter, to check that it is still the same one.
_synchronizers: dict[int, tuple[weakref.ref[Any], weakref.ref[Synchronizer]]] = {}


def register_synchronizer(synchronizer: Synchronizer, params: Iterable[Any]) -> None:
    """Register what makes some parameters equal again; not collective, but every rank should call it.

    Only a weak reference to the synchronizer is kept. It replaces what was registered for the parameters before.
    """
    for param in params:
        key = id(param)
        _synchronizers[key] = (weakref.ref(param, lambda ref, key=key: _forget(key, ref)), weakref.ref(synchronizer))  # type: ignore[misc]


def synchronize_replicas(model: Model) -> None:
    """Make the parameters of a model, or of a part of one, equal on all ranks, by what is registered; collective."""
    synchronizers: list[Synchronizer] = []
    for _, param in sorted(model.namedparams(), key=lambda named: named[0]):
        known, synchronizer = _synchronizers.get(id(param), (None, None))
        found = synchronizer() if synchronizer is not None and known is not None and known() is param else None
        if found is not None and not any(found is each for each in synchronizers):
            synchronizers.append(found)
    for each in synchronizers:
        each.synchronize()


def _forget(key: int, ref: weakref.ref[Any]) -> None:
    if key in _synchronizers and _synchronizers[key][0] is ref:
        del _synchronizers[key]
