"""The finder: handles only ``chainermn``, and the modules of ``chainer``."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from mn_compat.fixes import selected
from mn_compat.loader import SubstitutingLoader
from mn_compat.ownership import find_chainermn
from mn_compat.release import SUPPORTED, release_in
from mn_compat.substitution import Substitution


class ChainerFinder:
    """Finds our ``chainermn``, and the Chainer modules that have a substitution.

    For all other names it returns None, so that other finders handle them.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that this finder handles, None for any other.

        Raises:
            ImportError: A setting in the environment or the installed Chainer is not supported.
        """
        if fullname == "chainermn":
            return find_chainermn()
        if not fullname.startswith("chainer.") or fullname not in load_table() or not _can_be_patched():
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _patching_loader(spec)
        return spec


@functools.cache
def load_table() -> dict[str, tuple[Substitution, ...]]:
    """Return the substitutions of every fix that is not omitted, by module."""
    table: dict[str, tuple[Substitution, ...]] = {}
    for fix in selected():
        for substitution in fix.substitutions:
            table[substitution.module] = (*table.get(substitution.module, ()), substitution)
    return table


def _can_be_patched() -> bool:
    """Return whether the Chainer that is being imported is supported; any finder may have found it."""
    folder = next(iter(getattr(sys.modules.get("chainer"), "__path__", ())), None)
    return folder is not None and _is_supported(os.fspath(folder))


@functools.cache
def _is_supported(folder: str) -> bool:
    release = release_in(folder)
    if not release.supported:
        warnings.warn(
            f"mn_compat supports Chainer {' and '.join(SUPPORTED)}, and does not patch Chainer {release.version} "
            f"in {release.directory}",
            RuntimeWarning,
            stacklevel=2,
        )
    return release.supported


def _patching_loader(spec: ModuleSpec) -> SubstitutingLoader:
    if not isinstance(spec.loader, SourceFileLoader):
        raise ImportError(  # noqa: TRY004 - an import fails with ImportError
            f"expecting {spec.name} as a source file, which mn_compat can patch, got {spec.loader!r}",
            name=spec.name,
            path=spec.origin,
        )
    return SubstitutingLoader(spec.name, spec.loader.path, load_table()[spec.name])
