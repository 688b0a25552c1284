"""The parameters of a model, each once."""

from __future__ import annotations

from typing import Any

import chainer

__all__ = ["initialised_parameters"]


def initialised_parameters(model: chainer.Link) -> dict[str, chainer.Parameter]:
    """Return the parameters that are initialised, by name, sorted by name.

    A parameter that goes by several names, or lies in the same memory as another, is there once, under the first of its
    names: what is added to it must not be added twice.
    """
    found: dict[str, chainer.Parameter] = {}
    places = set()
    for name, param in sorted(model.namedparams(), key=lambda named: named[0]):
        if param.data is not None and (place := _place_of(param.data)) not in places:
            places.add(place)
            found[name] = param
    return found


def _place_of(array: Any) -> tuple[str, int, int]:
    """Return where an array begins, and how long it is."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return "host", array.ctypes.data, array.nbytes if array.size else -id(array)
    return "device", interface["data"][0], array.nbytes if array.size else -id(array)
