"""Devices by number."""

from __future__ import annotations

from typing import Any

import chainer

__all__ = ["get_device"]


def get_device(device_id: int | None = None, use_chainerx: bool = False) -> Any:
    """Return a device of Chainer's.

    Args:
        device_id: The number of a GPU; ``None`` for the CPU.
        use_chainerx: Whether to return a device of ChainerX.

    Raises:
        ValueError: There is no such device.
        RuntimeError: CuPy or ChainerX is missing, or the GPU is.
    """
    if use_chainerx:
        return chainer.get_device("native:0" if device_id is None else f"cuda:{device_id}")
    return chainer.get_device("@numpy" if device_id is None else f"@cupy:{device_id}")
