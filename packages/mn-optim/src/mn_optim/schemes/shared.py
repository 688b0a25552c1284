"""Distributing rank 0's parameters to all ranks, including ranks that could not initialise theirs without data."""

from __future__ import annotations

import chainer
import numpy as np
from chainer.serializers import DictionarySerializer, NpzDeserializer

from mn_comm import CommunicatorBase
from mn_optim.schemes.parameters import renew_copy
from mn_optim.side_effects import persistents_of

__all__ = ["fill_in", "share_out"]


def share_out(communicator: CommunicatorBase, model: chainer.Link, fills_in: bool) -> None:
    """Distribute the parameters of rank 0 to all ranks; collective.

    Args:
        communicator: The ranks.
        model: The model.
        fills_in: Whether parameters that are initialised only on some ranks are first initialised on the others.
    """
    if fills_in:
        fill_in(communicator, model)
    communicator.bcast_data(model)
    for param in model.params():
        renew_copy(param)


def fill_in(communicator: CommunicatorBase, model: chainer.Link) -> None:
    """Give ranks with uninitialised parameters the model of the rank with the most initialised ones; collective.

    Chainer's links initialise parameters of unknown size when they are first called; a rank without data calls none.

    Args:
        communicator: The ranks.
        model: The model.
    """
    missing = [sorted(name for name, param in model.namedparams() if param.data is None)]
    missing = communicator.allgather_obj(missing[0])
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
