"""Every fix, one file per topic; each is a table and a reason.

``MN_COMPAT_SKIP`` in the environment names fixes to omit, separated by commas; ``all`` omits all of them.
"""

from __future__ import annotations

import os

from mn_compat.fixes import (
    cupy,
    deprecations,
    differentiation,
    evaluator,
    iterators,
    nep50,
    numpy_names,
    numpy_results,
    protobuf,
    scipy_h5py,
    setuptools,
)
from mn_compat.substitution import Fix

VARIABLE = "MN_COMPAT_SKIP"

FIXES: tuple[Fix, ...] = (
    *numpy_names.FIXES,
    *numpy_results.FIXES,
    *nep50.FIXES,
    *setuptools.FIXES,
    *protobuf.FIXES,
    *scipy_h5py.FIXES,
    *deprecations.FIXES,
    *iterators.FIXES,
    *evaluator.FIXES,
    *differentiation.FIXES,
    *cupy.FIXES,
)


def selected() -> tuple[Fix, ...]:
    """Return the fixes that the environment does not omit.

    Raises:
        ImportError: The environment names a fix that does not exist.
    """
    skipped = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    if skipped == {"all"}:
        return ()
    unknown = skipped - {fix.name for fix in FIXES}
    if unknown:
        known = ", ".join(sorted(fix.name for fix in FIXES))
        raise ImportError(f"expecting {VARIABLE} to name fixes among {known}, got {', '.join(sorted(unknown))}")
    return tuple(fix for fix in FIXES if fix.name not in skipped)
