"""Installs the finder, once, and raises an error if it is too late."""

from __future__ import annotations

import sys

from mn_compat.finder import ChainerFinder, load_table
from mn_compat.loader import SubstitutingLoader
from mn_compat.ownership import find_chainermn
from mn_compat.release import find_release
from mn_compat.restorations import requested
from mn_compat.restoring import restore

_FINDER = ChainerFinder()


def activate() -> ChainerFinder:
    """Put the finder first in ``sys.meta_path`` and return it; a second call changes nothing.

    Raises:
        ImportError: Chainer, or the bundled ``chainermn``, was imported before; or ``MN_COMPAT_RESTORE`` holds an
            unknown name.
    """
    if _FINDER in sys.meta_path:
        return _FINDER
    _refuse_if_late()
    wanted = requested()
    # The small finder of the start-up module is no longer needed.
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "_mn_compat_startup"]
    sys.meta_path.insert(0, _FINDER)
    restore(*wanted)
    return _FINDER


def is_active() -> bool:
    """Return whether ``import chainer`` uses, or has used, the finder."""
    return _FINDER in sys.meta_path


def _refuse_if_late() -> None:
    late = _unpatched_modules()
    if late:
        raise ImportError(
            f"chainer was imported before mn_compat, so {len(late)} of its modules were loaded without their "
            f"fixes ({late[0]}, …): import mn_compat or chainermn before chainer",
            name="mn_compat",
        )
    chainermn = sys.modules.get("chainermn")
    ours = find_chainermn() if chainermn is not None else None
    loaded = getattr(chainermn, "__file__", None)
    if ours is not None and loaded != ours.origin:
        raise ImportError(
            f"chainermn was imported before mn_compat, from {loaded} instead of {ours.origin}: "
            "import mn_compat before chainermn",
            name="mn_compat",
        )


def _unpatched_modules() -> list[str]:
    # These exist also after an import of Chainer that has failed.
    loaded = [name for name in sys.modules if name.startswith("chainer.")]
    release = find_release() if loaded else None
    if release is None or not release.supported:
        return []
    return [
        name
        for name in sorted(load_table().keys() & loaded)
        if not isinstance(getattr(sys.modules[name], "__loader__", None), SubstitutingLoader)
    ]
