"""Every fix, one file per topic; each is a table and a reason.

``MN_COMPAT_SKIP`` in the environment names fixes to omit, separated by commas; ``all`` omits all of them.
"""

from __future__ import annotations

import os

from mn_compat.fixes import chainer_bugs, cupy, deprecations, libraries, nep50, numpy_changes
from mn_compat.substitution import Fix

VARIABLE = "MN_COMPAT_SKIP"

_TOPICS = (numpy_changes, nep50, libraries, deprecations, chainer_bugs, cupy)
FIXES: tuple[Fix, ...] = tuple(fix for topic in _TOPICS for fix in topic.FIXES)


def selected() -> tuple[Fix, ...]:
    """Return the fixes that the environment does not omit.

    Raises:
        ImportError: The environment names a fix that does not exist.
    """
    skipped = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    if skipped == {"all"}:
        return ()
    known = {fix.name for fix in FIXES}
    unknown = ", ".join(sorted(skipped - known))
    if unknown:
        raise ImportError(f"expecting {VARIABLE} to name fixes among {', '.join(sorted(known))}, got {unknown}")
    return tuple(fix for fix in FIXES if fix.name not in skipped)
