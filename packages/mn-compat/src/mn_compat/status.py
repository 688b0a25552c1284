"""The status of mn_compat in this interpreter, as a record for diagnosis."""

from __future__ import annotations

from importlib.machinery import PathFinder
from typing import NamedTuple

from mn_compat.activation import is_active
from mn_compat.fixes import FIXES, selected
from mn_compat.ownership import find_chainermn
from mn_compat.release import SUPPORTED, Release, find_release
from mn_compat.restoring import restored


class Status(NamedTuple):
    """Whether Chainer is patched, and how.

    Attributes:
        active: Whether ``import chainer`` gives a patched Chainer.
        reason: Why, or why not, in one sentence.
        chainer_version: Version of the installed Chainer; None if there is none.
        chainer_path: Folder of the installed Chainer; None if there is none.
        chainermn_path: The file that ``import chainermn`` would load; None if there is none.
        chainermn_is_ours: Whether that file is ours rather than the copy in Chainer's wheel.
        left_out: Names of the fixes that ``MN_COMPAT_SKIP`` omits.
        restored: Names of the restorations by ``MN_COMPAT_RESTORE`` or :func:`mn_compat.restore`.
    """

    active: bool
    reason: str
    chainer_version: str | None
    chainer_path: str | None
    chainermn_path: str | None
    chainermn_is_ours: bool
    left_out: tuple[str, ...]
    restored: tuple[str, ...]


def status() -> Status:
    """Return whether Chainer is patched, and how, without importing it.

    Raises:
        ImportError: ``CHAINERMN_IMPL`` or ``MN_COMPAT_SKIP`` has an unknown value.

    Example:
        >>> mn_compat.status().chainer_version
        '7.8.1'
    """
    release = find_release()
    ours = find_chainermn()
    chainermn = ours or PathFinder.find_spec("chainermn")
    kept = {fix.name for fix in selected()}
    active, reason = _judge(release, bool(kept))
    return Status(
        active=active,
        reason=reason,
        chainer_version=release.version if release else None,
        chainer_path=release.directory if release else None,
        chainermn_path=chainermn.origin if chainermn else None,
        chainermn_is_ours=ours is not None,
        left_out=tuple(fix.name for fix in FIXES if fix.name not in kept),
        restored=restored(),
    )


def _judge(release: Release | None, any_fix: bool) -> tuple[bool, str]:
    if not is_active():
        return False, "the finder is not in sys.meta_path"
    if release is None:
        return False, "Chainer is not installed"
    if not release.supported:
        return False, f"Chainer {release.version} is not supported, only {' and '.join(SUPPORTED)}"
    if not any_fix:
        return False, "MN_COMPAT_SKIP omits every fix"
    return True, f"Chainer {release.version} is patched as it is imported"
