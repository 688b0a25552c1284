"""Sends the state of a training from a rank that has it to ranks that have joined: spares of an elastic job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mn_comm import MPI, ElasticCommunicator, raise_on_all, watched
from mn_extensions.checkpoint.replicas import optimizers_of

__all__ = ["Handover", "hand_over", "hyperparameters_of", "set_hyperparameters"]

_Array = np.ndarray[Any, Any]
_State = dict[str, _Array]
_PIECE_BYTES = 1 << 26  # MPI counts in 32 bits
_SMALL_BYTES = 1 << 12  # arrays up to this size are sent together, in one message
_TAG = 0


class Handover(NamedTuple):
    """What a rank that has joined receives.

    Attributes:
        number: The number of the state: the iteration.
        state: Arrays by their names.
        hyperparameters: Those of each optimizer; for Chainer, they are not part of its state.
    """

    number: int
    state: _State
    hyperparameters: list[dict[str, Any]]


def hand_over(comm: ElasticCommunicator, take: Any) -> Handover | None:
    """Send the state from the first rank that has it to all ranks that do not; collective, within a transaction.

    Args:
        comm: The ranks.
        take: Returns the state of this rank, as a :class:`Handover`; ``None`` on a rank that has joined.

    Returns:
        What this rank has received if it has joined; ``None`` on all other ranks.

    Raises:
        RuntimeError: All ranks that had the state are lost (on every rank).
    """
    has_it = comm.allgather_obj(take is not None)
    if not any(has_it):
        raise RuntimeError("the state of the training is lost: all ranks are, except those that have just joined")
    giver, takers = has_it.index(True), [rank for rank, has in enumerate(has_it) if not has]
    mine: Handover | None = None
    with raise_on_all(comm):
        if comm.rank == giver and takers:
            mine = take()
    ranks = watched(comm.mpi_comm)
    if mine is not None:
        for taker in takers:
            _send(ranks, mine, taker)
    return None if has_it[comm.rank] else _receive(ranks, giver)


def _send(ranks: Any, handover: Handover, dest: int) -> None:
    large = _largest_first(handover.state)
    head = [(name, array.dtype, array.shape) for name, array in large]
    names = {name for name, *_ in head}
    small = {name: array for name, array in handover.state.items() if name not in names}
    ranks.send((handover._replace(state=small), head), dest=dest, tag=_TAG)
    for _, array in large:
        for piece in _pieces(np.ascontiguousarray(array)):
            ranks.Send([piece, MPI.BYTE], dest=dest, tag=_TAG)


def _receive(ranks: Any, source: int) -> Handover:
    handover, head = ranks.recv(source=source, tag=_TAG)
    for name, dtype, shape in head:
        array = handover.state[name] = np.empty(shape, dtype)
        for piece in _pieces(array):
            ranks.Recv([piece, MPI.BYTE], source=source, tag=_TAG)
    return handover  # type: ignore[no-any-return]


def _largest_first(state: Mapping[str, _Array]) -> list[tuple[str, _Array]]:
    large = [(name, array) for name, array in state.items() if array.nbytes > _SMALL_BYTES]
    return sorted(large, key=lambda pair: (-pair[1].nbytes, pair[0]))


def _pieces(array: _Array) -> Iterable[_Array]:
    flat = array.reshape(-1).view(np.uint8)
    return (flat[begin : begin + _PIECE_BYTES] for begin in range(0, flat.size, _PIECE_BYTES))


def hyperparameters_of(target: Any) -> list[dict[str, Any]]:
    """Return the hyperparameters of the optimizers of a trainer or updater, such as learning rates."""
    return [dict(each.hyperparam.get_dict()) for each in optimizers_of(target) if hasattr(each, "hyperparam")]


def set_hyperparameters(target: Any, hyperparameters: Iterable[Mapping[str, Any]]) -> None:
    """Set the hyperparameters that :func:`hyperparameters_of` has returned on another rank."""
    optimizers = [each for each in optimizers_of(target) if hasattr(each, "hyperparam")]
    for optimizer, found in zip(optimizers, hyperparameters, strict=True):
        for name, value in found.items():
            setattr(optimizer.hyperparam, name, value)
