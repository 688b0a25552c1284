"""Early stopping that stops all ranks at once."""

from __future__ import annotations

from typing import Any

from chainer.training import get_trigger
from chainer.training.triggers import EarlyStoppingTrigger

from mn_comm import CommunicatorBase
from mn_extensions.observation_aggregator import ObservationAggregator


class MultiNodeEarlyStoppingTrigger:
    """Chainer's ``EarlyStoppingTrigger`` on the mean over all ranks, so that it fires on all of them at once.

    Collective at every check.

    Args:
        comm: The ranks.
        check_trigger: When to compare the mean since the last check with the best so far, for example ``(1, "epoch")``.
        monitor: The observation to watch.
        patience: Stop after this number of checks without a better value; by default 3.
        mode: ``"max"`` if larger values are better, ``"min"`` if smaller ones are, ``"auto"`` to decide by the name.
        verbose: Whether to print what happens.
        max_trigger: When to stop in any case.
        suffix: Appended to ``monitor`` to make the name of the mean among the observations.
        kwargs: ``patients``, an old name of ``patience``.

    Example:
        >>> stop = chainermn.extensions.MultiNodeEarlyStoppingTrigger(
        ...     comm, monitor="validation/main/loss", patience=5, max_trigger=(100, "epoch")
        ... )
        >>> trainer = chainer.training.Trainer(updater, stop)
    """

    def __init__(
        self,
        comm: CommunicatorBase,
        *,
        check_trigger: Any = (1, "epoch"),
        monitor: str = "main/loss",
        patience: int | None = None,
        mode: str = "auto",
        verbose: bool = False,
        max_trigger: Any = (100, "epoch"),
        suffix: str = "_aggregated",
        **kwargs: Any,
    ) -> None:
        self._check, end = get_trigger(check_trigger), get_trigger(max_trigger)
        self._has_fired = False
        self.actual_trigger = EarlyStoppingTrigger(
            check_trigger=lambda _: self._has_fired,
            monitor=monitor + suffix,
            patience=patience,
            mode=mode,
            verbose=verbose,
            max_trigger=end,
            **kwargs,
        )
        self.aggregator = ObservationAggregator(comm, monitor, monitor + suffix, comm_trigger=self._ask)
        self._triggers = {"check": self._check, "end": end}

    def __call__(self, trainer: Any) -> bool:
        """Return whether to stop; collective at every check."""
        self.aggregator(trainer)
        return bool(self.actual_trigger(trainer))

    def _ask(self, trainer: Any) -> bool:
        """Ask the trigger for a check, once: the second time in an iteration, Chainer's triggers answer ``False``."""
        self._has_fired = bool(self._check(trainer))
        return self._has_fired

    def serialize(self, serializer: Any) -> None:
        """Save or load the best value, and how many checks ago it was found; older snapshots do not contain them."""
        actual = self.actual_trigger
        try:
            actual.count = int(serializer("count", actual.count))
            actual.best = float(serializer("best", actual.best))
        except (KeyError, ValueError):  # the latter is raised for an HDF5 file without the group
            return
        for name, trigger in self._triggers.items():
            if hasattr(trigger, "serialize"):
                trigger.serialize(serializer[name])

    def get_training_length(self) -> Any:
        """Return the number and the unit of ``max_trigger``."""
        return self.actual_trigger.get_training_length()
