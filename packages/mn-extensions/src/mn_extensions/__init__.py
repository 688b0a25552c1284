"""Trainer extensions for training on several ranks."""

import mn_comm  # noqa: F401 - before mpi4py, which it keeps from initialising MPI in worker processes
import mn_compat  # noqa: F401 - it makes Chainer importable
from mn_extensions.allreduce_persistent import AllreducePersistent
from mn_extensions.checkpoint import create_multi_node_checkpointer
from mn_extensions.compression_reporter import CompressionReporter
from mn_extensions.early_stopping import MultiNodeEarlyStoppingTrigger
from mn_extensions.evaluator import GenericMultiNodeEvaluator, create_multi_node_evaluator
from mn_extensions.main_rank import main_rank_only
from mn_extensions.memory_keeper import create_memory_keeper
from mn_extensions.observation_aggregator import ObservationAggregator
from mn_extensions.performance_reporter import PerformanceReporter
from mn_extensions.snapshot import multi_node_snapshot

__all__ = [
    "AllreducePersistent",
    "CompressionReporter",
    "GenericMultiNodeEvaluator",
    "MultiNodeEarlyStoppingTrigger",
    "ObservationAggregator",
    "PerformanceReporter",
    "create_memory_keeper",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "main_rank_only",
    "multi_node_snapshot",
]
