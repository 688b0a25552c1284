"""Observations averaged over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
from chainer.training import PRIORITY_EDITOR, Extension, get_trigger

from mn_comm import CommunicatorBase, raise_on_all, transact
from mn_extensions.evaluator import mean_of, on_host

Aggregator = Callable[[list[list[Any]]], Any]


class ObservationAggregator(Extension):  # type: ignore[misc]  # Chainer has no types
    """Replaces an observation by its mean over all ranks, or by another function of the values of all ranks.

    Collective whenever ``comm_trigger`` fires, which must happen at the same time on all ranks.

    Args:
        comm: The ranks.
        original_key: The observation.
        aggregated_key: The name for the result; by default ``original_key``.
        comm_trigger: When to communicate. All values since the last time are combined. No other extension can use the
            same object, as Chainer's triggers fire only for the first one that asks.
        aggregator: Computes the result; called on rank 0 with a list of values for each rank, in the order of ranks. By
            default the mean of all values. If no rank has any values, there is no result.

    Example:
        >>> trainer.extend(chainermn.extensions.ObservationAggregator(comm, "main/loss", "mean/loss"))
    """

    trigger = 1, "iteration"
    priority = PRIORITY_EDITOR
    name = None

    def __init__(
        self,
        comm: CommunicatorBase,
        original_key: str,
        aggregated_key: str | None = None,
        *,
        comm_trigger: Any = (1, "iteration"),
        aggregator: Aggregator | None = None,
    ) -> None:
        self.comm = comm
        self.original_key = original_key
        self.aggregated_key = original_key if aggregated_key is None else aggregated_key
        self.comm_trigger = get_trigger(comm_trigger)
        self.observation_history: list[Any] = []
        self.aggregator = aggregator or mean_of_all

    def __call__(self, trainer: Any) -> None:
        """Record the value of this iteration; when ``comm_trigger`` fires, add the result to the observations."""
        summary = self.compute_summary(trainer)
        if summary is not None:
            trainer.observation[self.aggregated_key] = summary

    def compute_summary(self, trainer: Any) -> Any:
        """Record the value of this iteration; when ``comm_trigger`` fires, return the result, otherwise ``None``.

        Raises:
            Exception: The exception that the aggregator raised on rank 0 (on every rank).
        """
        if self.original_key in trainer.observation:
            value = trainer.observation[self.original_key]
            self.observation_history.append(on_host(value.array if isinstance(value, chainer.Variable) else value))
        if not self.comm_trigger(trainer):
            return None
        summary = transact(self.comm, self._aggregate)
        self.observation_history = []
        return summary

    def _aggregate(self) -> Any:
        gathered = self.comm.gather_obj(self.observation_history)
        with raise_on_all(self.comm):
            summary = None if gathered is None else self.aggregator(gathered)
        return self.comm.bcast_obj(summary)


def mean_of_all(values: list[list[Any]]) -> Any:
    """Return the mean of the values of all ranks, or ``None`` if there are none."""
    flat = [value for each in values for value in each]
    return mean_of(flat) if flat else None
