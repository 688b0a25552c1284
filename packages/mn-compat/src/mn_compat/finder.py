"""The finder: handles only the names ``chainer`` and ``chainermn``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from mn_compat.loader import SubstitutingLoader
from mn_compat.ownership import find_chainermn
from mn_compat.release import SUPPORTED, Release, find_release, read_version
from mn_compat.substitution import Substitution

Table = dict[str, tuple[Substitution, ...]]


class ChainerFinder:
    """Finds our ``chainermn``, and the Chainer modules that have a substitution.

    For all other names it returns None, so that other finders handle them.
    """

    def __init__(self) -> None:
        # Both are created when Chainer is first imported: reading the tables takes a few milliseconds.
        self._release: Release | None = None
        self._table: Table | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that this finder handles, None for any other.

        Raises:
            ImportError: A setting in the environment or the installed Chainer is not supported.
        """
        if not fullname.startswith("chainer"):
            return None
        if fullname == "chainermn":
            return find_chainermn()
        if fullname == "chainer":
            self._meet(find_release())
            return None
        substitutions = self._substitutions(fullname)
        if not substitutions:
            return None
        return _patched_spec(fullname, path, target, substitutions)

    def _substitutions(self, fullname: str) -> tuple[Substitution, ...]:
        if self._table is None:
            self._table = load_table()
        substitutions = self._table.get(fullname, ())
        if not substitutions:
            return ()
        if self._release is None:
            # Another finder has found the package; its folder tells which release it is.
            self._meet(_imported_release())
        return substitutions if self._release is not None and self._release.supported else ()

    def _meet(self, release: Release | None) -> None:
        if release is None or release == self._release:
            return
        self._release = release
        if not release.supported:
            warnings.warn(
                f"mn_compat supports Chainer {' and '.join(SUPPORTED)}, and does not patch Chainer {release.version} "
                f"in {release.directory}",
                RuntimeWarning,
                stacklevel=2,
            )


def load_table() -> Table:
    """Return the substitutions of every fix that is not omitted, by module."""
    from mn_compat.fixes import selected

    table: dict[str, list[Substitution]] = {}
    for fix in selected():
        for substitution in fix.substitutions:
            table.setdefault(substitution.module, []).append(substitution)
    return {module: tuple(substitutions) for module, substitutions in table.items()}


def _imported_release() -> Release | None:
    locations = getattr(sys.modules.get("chainer"), "__path__", None)
    if not locations:
        return None
    directory = os.fspath(next(iter(locations)))
    return Release(directory, read_version(directory))


def _patched_spec(
    fullname: str,
    path: Sequence[str] | None,
    target: ModuleType | None,
    substitutions: tuple[Substitution, ...],
) -> ModuleSpec | None:
    spec = PathFinder.find_spec(fullname, path, target)
    if spec is None:
        return None
    if not isinstance(spec.loader, SourceFileLoader):
        raise ImportError(  # noqa: TRY004 - an import fails with ImportError
            f"expecting {fullname} as a source file, which mn_compat can patch, got {spec.loader!r}",
            name=fullname,
            path=spec.origin,
        )
    spec.loader = SubstitutingLoader(fullname, spec.loader.path, substitutions)
    return spec
