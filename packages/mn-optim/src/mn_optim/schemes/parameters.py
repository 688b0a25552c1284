"""The parameters of a model, their values, which an optimizer may keep in another dtype, and their distribution."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
from chainer.serializers import DictionarySerializer, NpzDeserializer

from mn_comm import CommunicatorBase
from mn_optim.sharding.parameters import place_of
from mn_optim.side_effects import persistents_of


def initialised_parameters(model: chainer.Link) -> dict[str, chainer.Parameter]:
    """Return the parameters that are initialised, by name, sorted by name.

    A parameter that has several names, or shares memory with another one, is returned once, under the first of its
    names, so that nothing is added to it twice.
    """
    found: dict[str, chainer.Parameter] = {}
    places = set()
    for name, param in sorted(model.namedparams(), key=lambda named: named[0]):
        if param.data is None:
            continue
        place = place_of(param.data)
        if place not in places or not param.data.size:
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


def _write_to_copy(param: chainer.Parameter, value: Any) -> None:
    copy = getattr(param.update_rule, "_fp32_param", None)
    if copy is not None and copy.data is not None:
        copy.data[...] = value


def share_out(communicator: CommunicatorBase, model: chainer.Link, fills_in: bool) -> None:
    """Distribute the parameters of rank 0 to all ranks; collective.

    Args:
        communicator: The ranks.
        model: The model.
        fills_in: Whether parameters that are initialised only on some ranks are first initialised on the others.
    """
    if fills_in:
        _fill_in(communicator, model)
    communicator.bcast_data(model)
    for param in model.params():
        _write_to_copy(param, param.data)  # it may be kept in another dtype, too


def _fill_in(communicator: CommunicatorBase, model: chainer.Link) -> None:
    """Give ranks with uninitialised parameters the model of the rank with the most initialised ones; collective.

    Chainer's links initialise parameters of unknown size when they are first called; a rank without data calls none.

    Args:
        communicator: The ranks.
        model: The model.
    """
    missing = communicator.allgather_obj(sorted(name for name, param in model.namedparams() if param.data is None))
    root = min(range(communicator.size), key=lambda rank: len(missing[rank]))
    if all(names == missing[root] for names in missing):
        return
    state = None
    if communicator.rank == root:
        writer = DictionarySerializer()
        writer.save(model)
        state = writer.target
    state = communicator.bcast_obj(state, root=root)
    if missing[communicator.rank] != missing[root]:
        NpzDeserializer(state, strict=False).load(model)
        _send_persistents(model)


def _send_persistents(model: chainer.Link) -> None:
    """Put new persistent values on the devices of their links."""
    for link, name, value in persistents_of(model.links()):
        if isinstance(value, np.ndarray) and link.device.xp is not np:
            setattr(link, name, link.device.send(value))
