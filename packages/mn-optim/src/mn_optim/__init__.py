"""Multi-node optimizers: a Chainer optimizer whose gradients are averaged over all ranks."""

import chainer

import mn_compat  # noqa: F401 - first: it makes Chainer importable
from mn_comm.building_blocks import check_in_debug_mode
from mn_optim.create import create_multi_node_optimizer
from mn_optim.lamb import LAMB
from mn_optim.last_statistics import keep_last_statistics
from mn_optim.learning_rates import (
    SLOW_START,
    LearningRateSchedule,
    RMSpropWarmupSchedule,
    gradual_warmup,
    linear_scaling,
    piecewise,
)
from mn_optim.optimizer import MultiNodeOptimizer
from mn_optim.rmsprop_warmup import RMSpropWarmup, sgd_share
from mn_optim.updater import MultiNodeUpdater
from mn_optim.when import (
    AfterBackward,
    Asynchronous,
    DiLoCo,
    DuringBackward,
    LocalSGD,
    OneStepLate,
    Sharded,
    StreamingDiLoCo,
    SynchronousFirst,
    When,
)

__all__ = [
    "LAMB",
    "SLOW_START",
    "AfterBackward",
    "Asynchronous",
    "DiLoCo",
    "DuringBackward",
    "LearningRateSchedule",
    "LocalSGD",
    "MultiNodeOptimizer",
    "MultiNodeUpdater",
    "OneStepLate",
    "RMSpropWarmup",
    "RMSpropWarmupSchedule",
    "Sharded",
    "StreamingDiLoCo",
    "SynchronousFirst",
    "When",
    "create_multi_node_optimizer",
    "gradual_warmup",
    "keep_last_statistics",
    "linear_scaling",
    "piecewise",
    "sgd_share",
]

check_in_debug_mode(chainer.is_debug)
