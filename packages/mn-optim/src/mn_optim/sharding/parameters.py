"""Properties of a model's parameters that sharding needs: sizes, shared memory, independent update rules."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import chainer
import numpy as np

from mn_optim.sharding.partition import Item, join_groups

Params = Mapping[str, chainer.Parameter]

_LEAVES = (type, ModuleType, BuiltinFunctionType, np.ndarray, np.generic, str, bytes, int, float, complex, type(None))
_MOST_OBJECTS = 1000


def with_rules(model: chainer.Link) -> dict[str, chainer.Parameter]:
    """Return the parameters that can be updated, by name: initialised, with an update rule."""
    named = sorted(model.namedparams(), key=lambda each: each[0])
    return {name: param for name, param in named if param.data is not None and param.update_rule is not None}


def items_of(params: Params) -> dict[str, Item]:
    """Return the items from which the owners of parameters are chosen."""
    return {name: Item(_state_bytes(param), not param.update_rule.enabled) for name, param in params.items()}


def _state_bytes(param: chainer.Parameter) -> int:
    """Return the size in bytes of an array like the parameter, in the dtype in which it is updated."""
    is_master_kept = getattr(param.update_rule, "_use_fp32_update", False) and param.data.dtype == np.float16
    return int(param.data.size) * (4 if is_master_kept else int(param.data.dtype.itemsize))


def aliases(params: Params) -> list[list[str]]:
    """Return the names of parameters that must have the same owner: they share memory, or an update rule."""
    groups: list[list[str]] = []
    users: dict[int, list[str]] = {}
    for name, param in params.items():
        users.setdefault(id(param.update_rule), []).append(name)
    groups += [names for names in users.values() if len(names) > 1]
    places = sorted((*place_of(param.data), name) for name, param in params.items() if param.data.size)
    last_end, last_name = 0, ""
    for begin, end, name in places:
        if begin < last_end:
            groups.append([last_name, name])
        if end > last_end:
            last_end, last_name = end, name
    return join_groups(groups)


def place_of(array: Any) -> tuple[int, int]:
    """Return the first and last address of an array; the result differs for devices and host memory."""
    begin: int = array.data.ptr if hasattr(array, "__cuda_array_interface__") else array.ctypes.data
    reaches = [stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)]
    low, high = sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches)
    return begin + low, begin + high + int(array.itemsize)


def expect_independent_rules(optimizer: Any, model: chainer.Link, params: Params) -> None:
    """Raise unless each parameter can be updated independently, as far as this can be detected.

    Raises:
        TypeError: The optimizer has no update rules, or a rule holds parameters other than its own, a link or an
            optimizer.
    """
    if not params and next(iter(model.params()), None) is not None and not hasattr(optimizer, "create_update_rule"):
        raise TypeError(
            "Sharded: expected an optimizer that has an update rule for each parameter, a "
            f"chainer.GradientMethod; got {type(optimizer).__name__}"
        )
    for name, param in params.items():
        rule = param.update_rule
        own = {id(param), id(getattr(rule, "_fp32_param", None))}
        for found in _reached_from(rule, own):
            raise TypeError(
                f"Sharded: expected update rules that read only their own parameter, but {type(rule).__name__} of "
                f"{name} holds {_describe(found)}: the rank that updates {name} would read values that others have "
                "still to update"
            )


def _reached_from(rule: Any, own: set[int]) -> Iterator[Any]:
    """Yield objects that an update rule can reach through its attributes, and that may contain other parameters."""
    waiting = [rule]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        each = waiting.pop()
        if id(each) in seen or id(each) in own or isinstance(each, _LEAVES):
            continue
        if isinstance(each, chainer.Variable | chainer.Link | chainer.Optimizer):
            yield each
        seen.add(id(each))
        if isinstance(each, FunctionType):  # not the module's variables, which belong to all code
            waiting += [*(each.__defaults__ or ()), *(each.__closure__ or ())]
        else:
            waiting += gc.get_referents(each)


def _describe(found: Any) -> str:
    name = getattr(found, "name", None)
    return f"a {type(found).__name__}" + (f" ({name})" if isinstance(name, str) else "")
