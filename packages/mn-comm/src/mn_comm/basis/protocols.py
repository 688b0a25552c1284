"""The interfaces of a model and a parameter. Chainer's classes have them, but nothing here imports Chainer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Parameter(Protocol):
    """A parameter: two arrays of equal shape and dtype, either of which may be missing.

    Attributes:
        data: The value, an array, or ``None`` while the shape is not yet known.
        grad: The gradient, an array of the shape and dtype of ``data``, or ``None``.
    """

    data: Any
    grad: Any


@runtime_checkable
class Model(Protocol):
    """Any object that can list its parameters with their names."""

    def namedparams(self) -> Iterable[tuple[str, Any]]:
        """Yield ``(name, parameter)`` pairs; names are unique within the model."""
