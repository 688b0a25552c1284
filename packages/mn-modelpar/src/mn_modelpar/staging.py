"""Copies of arrays between a device and the host; the only place to change if arrays on devices are sent directly."""

from __future__ import annotations

from typing import Any, TypeAlias

import chainer
from chainer import backend
from chainer.backends import cuda

DeviceName: TypeAlias = int | str | Any | None
"""The number of a GPU, a device of Chainer's or its name; -1 or ``None`` to leave an array where it is."""


def to_host(array: Any) -> Any:
    """Return an array in host memory: the array itself, or a copy of an array on a device."""
    return cuda.to_cpu(array)


def to_device_of(like: Any, array: Any) -> Any:
    """Return an array on the device of ``like``: the array itself, or a copy."""
    return backend.get_device_from_array(like).send(array)


def empty_like(like: Any) -> Any:
    """Return an empty float32 array on the device of ``like``."""
    return backend.get_array_module(like).empty(0, dtype="float32")


def put_on(device: Any, value: chainer.Variable) -> chainer.Variable:
    """Return a Variable on a device of Chainer's: the Variable itself, or a differentiable copy."""
    return value if value.device == device else chainer.functions.copy(value, device)


def moved_to(name: DeviceName, values: tuple[chainer.Variable, ...]) -> tuple[chainer.Variable, ...]:
    """Return Variables on a device that the user has chosen; the copy is differentiable."""
    if name is None or name == -1:
        return values
    device = chainer.get_device(f"@cupy:{name}" if isinstance(name, int) else name)
    return tuple(put_on(device, value) for value in values)
