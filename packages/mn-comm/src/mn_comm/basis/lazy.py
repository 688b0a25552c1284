"""Packages and modules whose names are loaded when first asked for."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


class _Later(types.ModuleType):
    """Acts as a module, which is imported when one of its names is first used."""

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = getattr(importlib.import_module(self.__name__), name)
        return value


def load_later(name: str) -> types.ModuleType:
    """Return an object that acts as a module, which is imported when one of its names is first used."""
    return _Later(name)


def load_on_demand(
    module: str, home_of: Mapping[str, str], home_of_others: Callable[[str], str | None] = lambda name: None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a module.

    ``home_of`` has the names of modules of this package, by the names that they define; ``home_of_others`` returns the
    name of the module for any other name, or ``None``.
    """

    def find(name: str) -> Any:
        home = home_of.get(name) or home_of_others(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"mn_comm.{home}"), name)
        setattr(sys.modules[module], name, found)
        return found

    return find, lambda: sorted({*vars(sys.modules[module]), *home_of})
