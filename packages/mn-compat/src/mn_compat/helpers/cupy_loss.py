"""Says why Chainer computes on the CPU although CuPy is installed."""

from __future__ import annotations

import warnings


def report(error: Exception) -> None:
    """Warn that CuPy is there but does not load; say nothing if it is not installed."""
    if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
        return
    # No stack level is the user's: between here and their import lies all of Chainer.
    warnings.warn(
        "CuPy is installed but cannot be used, so Chainer computes on the CPU only "
        f"(chainer.backends.cuda._resolution_error): {type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=2,
    )
