"""What to say where cuDNN is asked for and missing, or where CuPy cannot be used."""

from __future__ import annotations

import os
import warnings
from typing import Any

_said: list[str] = []


class NoDriverError(RuntimeError):
    """CuPy is installed on a machine without a driver, such as the login node of a cluster."""


def require_driver(cuda: Any) -> bool:
    """Return True if this machine has NVIDIA's driver, without which CuPy can be imported but not used.

    Args:
        cuda: The module ``cupy.cuda``.

    Raises:
        NoDriverError: There is none.
    """
    if cuda.runtime.driverGetVersion() == 0:
        raise NoDriverError("CuPy is installed, but this machine has no driver of NVIDIA (libcuda.so.1)")
    return True


def report_loss(error: Exception) -> None:
    """Warn if CuPy is installed but cannot be imported; do nothing if it, or the driver, is not installed.

    Without the warning, nothing would explain why Chainer computes on the CPU.
    """
    if isinstance(error, NoDriverError) or (isinstance(error, ModuleNotFoundError) and error.name == "cupy"):
        return
    # No stack level leads to the user's code: all of Chainer lies between here and the user's import.
    warnings.warn(
        "CuPy is installed but cannot be used, so Chainer computes on the CPU only "
        f"(chainer.backends.cuda._resolution_error): {type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=2,
    )


def without_cudnn(setting: str, cuda: Any) -> bool:
    """Return False, because cuDNN is not used; warn once if the setting says that it must be.

    Args:
        setting: ``chainer.config.use_cudnn``.
        cuda: The module ``chainer.backends.cuda``.
    """
    if setting == "always" and _cudnn_is_missing(cuda) and not _said:
        _said.append(setting)
        warnings.warn(
            f"use_cudnn is 'always', but CuPy {cuda.cupy.__version__} has no cuDNN: Chainer's own kernels are used",
            RuntimeWarning,
            stacklevel=3,
        )
    return False


def require_cudnn(cuda: Any) -> bool:
    """Return True if the compute mode ``cudnn_fast`` is possible as far as one can tell before the first array.

    Args:
        cuda: The module ``chainer.backends.cuda``.

    Raises:
        RuntimeError: CuPy can be used, and has no cuDNN.
    """
    if _cudnn_is_missing(cuda):
        raise RuntimeError(
            f"compute_mode is 'cudnn_fast', which needs cuDNN, and CuPy {cuda.cupy.__version__} has none: "
            "remove this setting"
        )
    return True


def _cudnn_is_missing(cuda: Any) -> bool:
    # CHAINER_CUDNN=0 says that the user wants none.
    return cuda.available and not cuda.cudnn_enabled and os.environ.get("CHAINER_CUDNN", "1") != "0"
