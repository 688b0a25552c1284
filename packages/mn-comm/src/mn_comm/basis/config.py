"""The configuration of a communicator: immutable, and inherited by the communicators that are split from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mn_comm.basis.arithmetic import is_half


class Config(NamedTuple):
    """The settings that scripts pass to ``create_communicator`` or ``set_config``."""

    allreduce_grad_dtype: np.dtype[Any] | None = None  # the dtype in which gradients are sent, or `None` for their own
    batched_copy: bool = True  # whether gradients on a device are packed by one kernel; those in host memory never are

    def with_value(self, name: str, value: Any) -> Config:
        """Return this configuration with one setting changed.

        It raises ValueError if there is no such setting or value, and TypeError if the value is not of the right type.
        """
        self._check_name(name)
        return self._replace(**{name: _CHECKS[name](value)})

    def get(self, name: str | None = None) -> Any:
        """Return one setting, or all of them as a dictionary; raise ValueError if there is none of that name."""
        if name is None:
            return self._asdict()
        self._check_name(name)
        return getattr(self, name)

    def _check_name(self, name: str) -> None:
        if name not in self._fields:
            raise ValueError(f"expected the name of a setting, one of {', '.join(self._fields)}; got {name!r}")


def _check_batched_copy(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected a bool for batched_copy, got {type(value).__name__}: {value!r}")
    return value


def _check_wire_dtype(value: Any) -> np.dtype[Any] | None:
    if value is None:
        return None
    expected = "expected float16, bfloat16, float32, float64 or None for allreduce_grad_dtype"
    try:
        dtype = _bfloat16() if value == "bfloat16" else np.dtype(value)
    except TypeError:
        raise TypeError(f"{expected}, got {type(value).__name__}: {value!r}") from None
    if not (is_half(dtype) or dtype in (np.float32, np.float64)):
        raise ValueError(f"{expected}, got {dtype}")
    return dtype


def _bfloat16() -> np.dtype[Any]:
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise ValueError("bfloat16 needs the package ml_dtypes: pip install ml-dtypes") from None
    dtype: np.dtype[Any] = np.dtype(bfloat16)
    return dtype


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "allreduce_grad_dtype": _check_wire_dtype,
    "batched_copy": _check_batched_copy,
}
