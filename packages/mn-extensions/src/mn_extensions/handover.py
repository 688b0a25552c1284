"""Sends the state of a training from a rank that has it to ranks that have joined: spares of an elastic job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mn_comm import raise_on_all
from mn_elastic import ElasticCommunicator
from mn_extensions.checkpoint.arrays import State


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
    state: State
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
    giver = has_it.index(True)
    handovers: list[Handover | None] = [None] * comm.size
    with raise_on_all(comm):
        if comm.rank == giver and not all(has_it):
            mine = take()
            handovers = [None if has else mine for has in has_it]
    received: Handover | None = comm.scatter_obj(handovers, root=giver)  # which copies no array to send it
    return received


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
