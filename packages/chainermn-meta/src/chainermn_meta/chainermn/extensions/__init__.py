"""Trainer extensions for training on several ranks."""

from chainermn.extensions import (  # noqa: F401 - scripts reach them without another import
    _multi_node_snapshot,
    allreduce_persistent,
    checkpoint,
    multi_node_early_stopping_trigger,
    multi_node_evaluator,
    observation_aggregator,
)

from mn_extensions import (
    AllreducePersistent,
    GenericMultiNodeEvaluator,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
    PerformanceReporter,
    create_memory_keeper,
    create_multi_node_checkpointer,
    create_multi_node_evaluator,
    main_rank_only,
    multi_node_snapshot,
)
from mn_optim import LearningRateSchedule, RMSpropWarmupSchedule

__all__ = [
    "AllreducePersistent",
    "GenericMultiNodeEvaluator",
    "LearningRateSchedule",
    "MultiNodeEarlyStoppingTrigger",
    "ObservationAggregator",
    "PerformanceReporter",
    "RMSpropWarmupSchedule",
    "create_memory_keeper",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "main_rank_only",
    "multi_node_snapshot",
]
