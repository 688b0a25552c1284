"""Multi-node optimizers, and optimizers and schedules for large batches."""

from mn_optim import *  # noqa: F403
from mn_optim import MultiNodeOptimizer as _MultiNodeOptimizer
from mn_optim import __all__ as _names

# Schedules are extensions, and an updater belongs to a trainer; `When` is what an annotation needs.
_ELSEWHERE = {"LearningRateSchedule", "MultiNodeUpdater", "RMSpropWarmupSchedule", "When"}

__all__ = [*(name for name in _names if name not in _ELSEWHERE), "_MultiNodeOptimizer"]
