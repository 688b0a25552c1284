"""The parameters of a model, each once, and their values, which an optimizer may keep in another dtype."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np

__all__ = ["initialised_parameters", "renew_copy", "set_value", "value_of"]


def initialised_parameters(model: chainer.Link) -> dict[str, chainer.Parameter]:
    """Return the parameters that are initialised, by name, sorted by name.

    A parameter that has several names, or shares memory with another one, is returned once, under the first of its
    names, so that nothing is added to it twice.
    """
    found: dict[str, chainer.Parameter] = {}
    places = set()
    for name, param in sorted(model.namedparams(), key=lambda named: named[0]):
        if param.data is not None and (place := _place_of(param.data)) not in places:
            places.add(place)
            found[name] = param
    return found


def value_of(param: chainer.Parameter) -> Any:
    """Return a parameter's value: for half precision, the float32 copy if its optimizer keeps one.

    After ``optimizer.use_fp32_update()``, every step updates the copy, and then overwrites the parameter with it: a
    value written only to the parameter would be lost.
    """
    rule = param.update_rule
    if param.data.dtype != np.float16 or not getattr(rule, "_use_fp32_update", False):
        return param.data
    copy = rule._fp32_param  # noqa: SLF001 - there is no public name; the first step makes it
    return param.data.astype(np.float32) if copy is None else copy.data


def set_value(param: chainer.Parameter, value: Any) -> None:
    """Write a value to a parameter, and to the float32 copy of it that its optimizer may keep."""
    param.data[...] = value
    _write_to_copy(param, value)


def renew_copy(param: chainer.Parameter) -> None:
    """Write a parameter's own value to the float32 copy of it that its optimizer may keep."""
    _write_to_copy(param, param.data)


def _write_to_copy(param: chainer.Parameter, value: Any) -> None:
    copy = getattr(param.update_rule, "_fp32_param", None)
    if copy is not None and copy.data is not None:
        copy.data[...] = value


def _place_of(array: Any) -> tuple[str, int, int]:
    """Return the address and the length of an array."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return "host", array.ctypes.data, array.nbytes if array.size else -id(array)
    return "device", interface["data"][0], array.nbytes if array.size else -id(array)
