"""Sends the state of a training from a rank that has it to ranks that have joined: spares of an elastic job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mn_comm import raise_on_all
from mn_comm.building_blocks import MPI
from mn_elastic import ElasticCommunicator

__all__ = ["Handover", "Settings", "apply_settings", "hand_over", "settings_of"]

_Array = np.ndarray[Any, Any]
_State = dict[str, _Array]
_PIECE_BYTES = 1 << 26  # MPI counts in 32 bits
_SMALL_BYTES = 1 << 12  # arrays up to this size are sent together, in one message
_TAG = 0


class Settings(NamedTuple):
    """What a script may change in an optimizer during training, but Chainer does not save.

    Attributes:
        hyperparameters: Its hyperparameters, such as the learning rate.
        update_rules: For each parameter: whether it is updated, and the hyperparameters that it has of its own.
    """

    hyperparameters: dict[str, Any]
    update_rules: dict[str, tuple[bool, dict[str, Any]]]


class Handover(NamedTuple):
    """What a rank that has joined receives.

    Attributes:
        training: The number of the training in its script.
        number: The number of the state: the iteration.
        state: Arrays by their names.
        settings: Those of each optimizer.
    """

    training: int
    number: int
    state: _State
    settings: list[Settings]


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
    from mn_comm.building_blocks import Ranks  # not at import, because it starts MPI

    ranks = Ranks(comm.mpi_comm)
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


def settings_of(optimizers: Iterable[Any]) -> list[Settings]:
    """Return the settings of optimizers."""
    return [Settings(_own(each.hyperparam), _of_update_rules(each)) for each in _with_hyperparameters(optimizers)]


def apply_settings(optimizers: Iterable[Any], settings: Iterable[Settings]) -> None:
    """Set what :func:`settings_of` has returned on another rank."""
    for optimizer, found in zip(_with_hyperparameters(optimizers), settings, strict=True):
        _set(optimizer.hyperparam, found.hyperparameters)
        for name, rule in _update_rules(optimizer):
            if name in found.update_rules:
                rule.enabled, of_its_own = found.update_rules[name]
                _set(rule.hyperparam, of_its_own)


def _with_hyperparameters(optimizers: Iterable[Any]) -> list[Any]:
    return [each for each in optimizers if hasattr(each, "hyperparam")]


def _of_update_rules(optimizer: Any) -> dict[str, tuple[bool, dict[str, Any]]]:
    return {name: (bool(rule.enabled), _own(rule.hyperparam)) for name, rule in _update_rules(optimizer)}


def _update_rules(optimizer: Any) -> list[tuple[str, Any]]:
    model = optimizer.target
    found = [] if model is None else [(name, param.update_rule) for name, param in sorted(model.namedparams())]
    return [(name, rule) for name, rule in found if rule is not None]


def _own(hyperparam: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(hyperparam).items() if name != "_parent"}


def _set(hyperparam: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(hyperparam, name, value)
