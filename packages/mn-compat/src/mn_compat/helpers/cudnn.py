"""What to say where cuDNN is asked for and missing."""

from __future__ import annotations

import os
import warnings
from typing import Any

_said: list[str] = []


def without(setting: str, cuda: Any) -> bool:
    """Return False, because cuDNN is not used; warn once if the setting says that it must be.

    Args:
        setting: ``chainer.config.use_cudnn``.
        cuda: The module ``chainer.backends.cuda``.
    """
    if setting == "always" and _is_missing(cuda) and not _said:
        _said.append(setting)
        warnings.warn(
            f"use_cudnn is 'always', but CuPy {cuda.cupy.__version__} has no cuDNN: Chainer's own kernels are used",
            RuntimeWarning,
            stacklevel=3,
        )
    return False


def require(cuda: Any) -> bool:
    """Return True if the compute mode ``cudnn_fast`` is possible as far as one can tell before the first array.

    Args:
        cuda: The module ``chainer.backends.cuda``.

    Raises:
        RuntimeError: CuPy can be used, and has no cuDNN.
    """
    if _is_missing(cuda):
        raise RuntimeError(
            f"compute_mode is 'cudnn_fast', which needs cuDNN, and CuPy {cuda.cupy.__version__} has none: "
            "remove this setting"
        )
    return True


def _is_missing(cuda: Any) -> bool:
    # CHAINER_CUDNN=0 says that the user wants none.
    return cuda.available and not cuda.cudnn_enabled and os.environ.get("CHAINER_CUDNN", "1") != "0"
