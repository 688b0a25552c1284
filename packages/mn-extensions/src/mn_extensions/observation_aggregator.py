"""An observation of all ranks, put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
from chainer.training import PRIORITY_EDITOR, Extension, get_trigger

from mn_comm import CommunicatorBase, raise_on_all, transact
from mn_extensions.evaluator import on_host

__all__ = ["ObservationAggregator"]

Aggregator = Callable[[list[list[Any]]], Any]


class ObservationAggregator(Extension):  # type: ignore[misc]  # Chainer has no types
    """Replaces an observation by its mean over all ranks, or by another function of all ranks' values.

    Collective whenever ``comm_trigger`` fires, which must happen at the same time on all ranks.

    Args:
        comm: The ranks.
        original_key: The observation.
        aggregated_key: Under which name to put the result; by default ``original_key``.
        comm_trigger: When to communicate. The values since the last time are put together.
        aggregator: Makes the result; called on rank 0 with a list of values for each rank, in the order of ranks. By
            default the mean of all values; there is no result if no rank has any.

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
        """Note this iteration's value, and put the result among the observations when it is time to."""
        summary = self.compute_summary(trainer)
        if summary is not None:
            trainer.observation[self.aggregated_key] = summary

    def compute_summary(self, trainer: Any) -> Any:
        """Note this iteration's value, and return the result when it is time to, else ``None``.

        Raises:
            Exception: What the aggregator raised on rank 0 (on every rank).
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
    return sum(flat) / len(flat) if flat else None
