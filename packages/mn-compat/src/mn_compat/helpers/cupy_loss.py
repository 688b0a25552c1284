"""A warning that explains why Chainer computes on the CPU although CuPy is installed."""

from __future__ import annotations

import warnings

from mn_compat.helpers.cuda_driver import NoDriverError


def report(error: Exception) -> None:
    """Warn if CuPy is installed but cannot be imported; do nothing if it, or the driver, is not installed."""
    if isinstance(error, NoDriverError) or (isinstance(error, ModuleNotFoundError) and error.name == "cupy"):
        return
    # No stack level leads to the user's code: all of Chainer lies between here and the user's import.
    warnings.warn(
        "CuPy is installed but cannot be used, so Chainer computes on the CPU only "
        f"(chainer.backends.cuda._resolution_error): {type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=2,
    )
