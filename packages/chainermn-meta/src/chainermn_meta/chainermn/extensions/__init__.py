"""Trainer extensions for training on several ranks."""

from chainermn.extensions import (  # noqa: F401 - scripts reach them without another import
    _multi_node_snapshot,
    allreduce_persistent,
    checkpoint,
    multi_node_early_stopping_trigger,
    multi_node_evaluator,
    observation_aggregator,
)

from mn_extensions import *  # noqa: F403
from mn_extensions import __all__ as _names
from mn_optim import LearningRateSchedule as LearningRateSchedule
from mn_optim import RMSpropWarmupSchedule as RMSpropWarmupSchedule

__all__ = [*_names, "LearningRateSchedule", "RMSpropWarmupSchedule"]
