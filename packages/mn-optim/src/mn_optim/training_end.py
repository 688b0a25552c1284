"""The end of a training by Chainer's trainer, at which ranks that went their own ways come together."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from chainer.training import Extension, Trainer

__all__ = ["synchronize_at_the_end"]


class _Synchronizable(Protocol):
    def synchronize(self) -> None: ...


class _End(Extension):  # type: ignore[misc]  # Chainer has no types
    """Does nothing until the training ends.

    Args:
        optimizers: The optimizers to be synchronised then.
    """

    # Before all others: one of them may wait for other ranks that are still training.
    priority = 1_000_000

    def __init__(self, optimizers: Sequence[_Synchronizable]) -> None:
        self._optimizers = optimizers
        self._has_failed = False

    def trigger(self, trainer: Any) -> bool:  # a function has no state that would be in snapshots
        """Never have the extension called."""
        return False

    def __call__(self, trainer: Any) -> None:
        """Do nothing."""

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        """Remember that the training died: the other ranks may never come to its end."""
        self._has_failed = True

    def finalize(self) -> None:
        """Synchronise, unless the training ends by an exception; collective then."""
        # on_error is not called for a KeyboardInterrupt, but finalize is, while that is on its way.
        if not self._has_failed and sys.exc_info()[0] is None:
            for optimizer in self._optimizers:
                optimizer.synchronize()


@functools.cache
def synchronize_at_the_end(kind: type[Any]) -> None:
    """Have ``Trainer.run`` synchronise, when it ends well, its optimizers whose ranks may differ for a while.

    Chainer 7.8.1, whose code will not change any more, tells extensions and updaters of the end, but not optimizers.

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
