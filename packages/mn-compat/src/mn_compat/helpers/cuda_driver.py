"""Whether this machine has NVIDIA's driver, without which CuPy can be imported but not used."""

from __future__ import annotations

from typing import Any


class NoDriverError(RuntimeError):
    """CuPy is installed on a machine without a driver, such as the login node of a cluster."""


def require(cuda: Any) -> bool:
    """Return True if there is a driver.

    Args:
        cuda: The module ``cupy.cuda``.

    Raises:
        NoDriverError: There is none.
    """
    if cuda.runtime.driverGetVersion() == 0:
        raise NoDriverError("CuPy is installed, but this machine has no driver of NVIDIA (libcuda.so.1)")
    return True
