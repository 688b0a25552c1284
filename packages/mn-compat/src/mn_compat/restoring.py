"""Restores the requested names: immediately in modules that are already imported, otherwise at their import."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from mn_compat.restorations import Restoration, chosen

_PKG_RESOURCES = os.path.join(os.path.dirname(__file__), "helpers", "pkg_resources.py")


def restore(*names: str) -> None:
    """Restore names that other libraries have removed, in this process, from now on.

    A second call with the same name changes nothing; restoring cannot be undone. ``MN_COMPAT_RESTORE`` does the same
    before a script's first line.

    Args:
        names: Names from the table in the package's README; ``"all"`` for all of them.

    Raises:
        ValueError: There is no restoration with this name.
        RuntimeError: It cannot be restored on this interpreter.

    Example:
        >>> mn_compat.restore("numpy_names")
        >>> np.float is float
        True
    """
    wanted = chosen(names)
    if wanted and _RESTORER not in sys.meta_path:
        sys.meta_path.insert(0, _RESTORER)
    for restoration in wanted:
        if restoration in _RESTORER.wanted:
            continue
        module = sys.modules.get(restoration.module)
        if module is not None:
            restoration.apply(module)
        _RESTORER.wanted.append(restoration)


def restored() -> tuple[str, ...]:
    """Return the names of the requested restorations."""
    return tuple(restoration.name for restoration in _RESTORER.wanted)


class Restorer:
    """A finder that changes a library as soon as it is imported, and provides a stand-in for a missing one."""

    def __init__(self) -> None:
        self.wanted: list[Restoration] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that needs a restoration, None for any other module."""
        if all(fullname != restoration.module for restoration in self.wanted):
            return None
        spec = self._find(fullname, path, target)
        if spec is None and fullname == "pkg_resources":
            return spec_from_file_location(fullname, _PKG_RESOURCES)
        if spec is not None and spec.loader is not None:
            spec.loader = RestoringLoader(spec.loader)  # type: ignore[assignment] # importlib.abc takes 10 ms to import
        return spec

    def _find(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Ask the other finders, as ``import`` does."""
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        return next((spec for spec in found if spec is not None), None)


class RestoringLoader:
    """Loads a module with its own loader, to which ``__loader__`` still refers, and changes the module afterwards."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.create_module = loader.create_module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then restore the names that it no longer has."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for restoration in _RESTORER.wanted:
            if restoration.module == module.__name__:
                restoration.apply(module)


_RESTORER = Restorer()
