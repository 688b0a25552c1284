"""Evaluators whose results are averaged over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chainer.backends import cuda
from chainer.training.extensions import Evaluator

from mn_comm import CommunicatorBase, together

__all__ = ["create_multi_node_evaluator"]

Results = dict[str, Any]


def create_multi_node_evaluator(actual_evaluator: Evaluator, communicator: CommunicatorBase) -> Evaluator:
    """Make an evaluator report the mean over all ranks.

    Args:
        actual_evaluator: An evaluator, or one of a class derived from it, whose iterator goes through this rank's part
            of the samples. Its ``evaluate`` is replaced.
        communicator: The ranks that evaluate together.

    Returns:
        ``actual_evaluator`` itself. Its ``evaluate`` is now collective, and returns and reports, under each name, the
        plain mean of what the ranks got, however many samples each has; a rank that has nothing under a name is left
        out of its mean.

    Raises:
        TypeError: ``actual_evaluator`` has no ``evaluate``. What evaluating raises on one rank, it raises on all.
    """
    if not callable(getattr(actual_evaluator, "evaluate", None)):
        raise TypeError(
            "expected a chainer.training.extensions.Evaluator for actual_evaluator, got "
            f"{type(actual_evaluator).__name__}: {actual_evaluator!r:.80}"
        )
    # Replaced on the object, not in a wrapper: scripts pass on the evaluator they made, and their own classes call
    # self.evaluate().
    actual_evaluator.evaluate = _MeanOverRanks(actual_evaluator.evaluate, communicator)
    return actual_evaluator


class _MeanOverRanks:
    """An ``evaluate`` that averages the results of another over all ranks."""

    def __init__(self, evaluate: Callable[[], Results], communicator: CommunicatorBase) -> None:
        self._evaluate = evaluate
        self._communicator = communicator

    def __call__(self) -> Results:
        with together(self._communicator.mpi_comm):
            results = {name: cuda.to_cpu(value) for name, value in self._evaluate().items()}
        return plain_mean(self._communicator.allgather_obj(results))


def plain_mean(results: Sequence[Results]) -> Results:
    """Return, under each name, the mean of what the ranks got, added up in the order of ranks."""
    names = sorted({name for each in results for name in each})
    columns = {name: [each[name] for each in results if name in each] for name in names}
    return {name: sum(column) / len(column) for name, column in columns.items()}
