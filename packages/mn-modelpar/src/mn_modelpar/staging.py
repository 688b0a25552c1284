"""Where arrays change between a device and the host: the one seam to open when mn_comm takes device arrays."""

from __future__ import annotations

from typing import Any

import chainer
from chainer import backend
from chainer.backends import cuda

__all__ = ["empty_like", "put_on", "to_device_of", "to_host"]


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
