"""Synchronising the ranks at the end of training with Chainer's trainer, after local or asynchronous steps."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

from chainer.training import Extension, Trainer


class _End(Extension):  # type: ignore[misc]  # Chainer has no types
    """Does nothing until training ends.

    Args:
        optimizers: The optimizers to synchronise then.
    """

    # Before all others: one of them may wait for other ranks that are still training.
    priority = 1_000_000

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._has_failed = False
        self._handled = id(sys.exc_info()[1])  # training may run where an exception is handled

    def trigger(self, trainer: Any) -> bool:  # a function has no state that would be saved in snapshots
        """Never trigger the extension."""
        return False

    def __call__(self, trainer: Any) -> None:
        """Do nothing."""

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        """Remember that training failed: the other ranks may never reach its end."""
        self._has_failed = True

    def finalize(self) -> None:
        """Synchronise if training ends without an exception; collective in that case."""
        # on_error is not called for a KeyboardInterrupt, but finalize is, while that is on its way.
        if not self._has_failed and id(sys.exc_info()[1]) == self._handled:
            for optimizer in self._optimizers:
                optimizer.synchronize()


@functools.cache
def synchronize_at_the_end(kind: type[Any]) -> None:
    """Make ``Trainer.run`` synchronise, when it ends normally, optimizers whose ranks may differ temporarily.

    Chainer 7.8.1, whose code will not change any more, informs extensions and updaters of the end, but not optimizers.

    Args:
        kind: Their class, which has ``synchronize`` and ``may_diverge``.
    """
    run = Trainer.run

    @functools.wraps(run)
    def run_and_synchronize(self: Any, *args: Any, **kwds: Any) -> None:
        found = sorted(self.updater.get_all_optimizers().items())
        optimizers = [each for _, each in found if isinstance(each, kind) and each.may_diverge]
        if optimizers:
            self.extend(_End(optimizers), name="mn_optim.synchronize_at_the_end")
        run(self, *args, **kwds)

    Trainer.run = run_and_synchronize
