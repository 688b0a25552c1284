"""Trainer extensions that know of the other ranks."""

from mn_extensions import (
    AllreducePersistent,
    GenericMultiNodeEvaluator,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
    create_multi_node_checkpointer,
    create_multi_node_evaluator,
    main_rank_only,
    multi_node_snapshot,
)

__all__ = [
    "AllreducePersistent",
    "GenericMultiNodeEvaluator",
    "MultiNodeEarlyStoppingTrigger",
    "ObservationAggregator",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "main_rank_only",
    "multi_node_snapshot",
]
