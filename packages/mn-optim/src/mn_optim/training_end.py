"""The end of a training by Chainer's trainer, at which ranks that went their own ways come together."""

from __future__ import annotations

import functools
from typing import Any

from chainer.training import Trainer

__all__ = ["synchronize_at_the_end"]


@functools.cache
def synchronize_at_the_end() -> None:
    """Have ``Trainer.run`` synchronise the multi-node optimizers when it ends well; to do so again does nothing.

    Chainer 7.8.1, whose code will not change any more, tells extensions and updaters of the end, but not optimizers.
    """
    run = Trainer.run

    @functools.wraps(run)
    def run_and_synchronize(self: Any, *args: Any, **kwds: Any) -> None:
        run(self, *args, **kwds)
        for _, optimizer in sorted(self.updater.get_all_optimizers().items()):
            synchronize = getattr(optimizer, "synchronize", None)
            if synchronize is not None and optimizer.target is not None:
                synchronize()

    Trainer.run = run_and_synchronize
