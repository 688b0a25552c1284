"""Where arrays change between a device and the host: the one seam to open when mn_comm takes device arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import chainer
from chainer import backend
from chainer.backends import cuda

__all__ = ["DeviceName", "empty_like", "moved_to", "put_on", "to_device_of", "to_host"]

DeviceName: TypeAlias = int | str | Any | None
"""A GPU's number, a name or device of Chainer's, or -1 or ``None`` for wherever something is."""


def to_host(array: Any) -> Any:
    """Return an array as one in host memory: itself, or a copy of one on a device."""
    return cuda.to_cpu(array)


def to_device_of(like: Any, array: Any) -> Any:
    """Return an array as one that lives where ``like`` does: itself, or a copy."""
    return backend.get_device_from_array(like).send(array)


def empty_like(like: Any) -> Any:
    """Return an array of no elements, of dtype float32, that lives where ``like`` does."""
    return backend.get_array_module(like).empty(0, dtype="float32")


def put_on(device: Any, value: chainer.Variable) -> chainer.Variable:
    """Return a Variable on a device of Chainer's: itself, or a copy that gradients travel back through."""
    return value if value.device == device else chainer.functions.copy(value, device)


def moved_to(name: DeviceName, values: tuple[chainer.Variable, ...]) -> tuple[chainer.Variable, ...]:
    """Return Variables on a device that a user named; gradients travel back through the move."""
    if name is None or name == -1:
        return values
    device = chainer.get_device(f"@cupy:{name}" if isinstance(name, int) else name)
    return tuple(put_on(device, value) for value in values)
