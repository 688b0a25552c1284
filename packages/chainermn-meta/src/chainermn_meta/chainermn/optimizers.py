"""Multi-node optimizers, and optimizers and schedules for large batches."""

from mn_optim import (
    LAMB,
    SLOW_START,
    Asynchronous,
    DiLoCo,
    LocalSGD,
    RMSpropWarmup,
    StreamingDiLoCo,
    create_multi_node_optimizer,
    gradual_warmup,
    keep_last_statistics,
    linear_scaling,
    piecewise,
    sgd_share,
)
from mn_optim import MultiNodeOptimizer as _MultiNodeOptimizer

__all__ = [
    "LAMB",
    "SLOW_START",
    "Asynchronous",
    "DiLoCo",
    "LocalSGD",
    "RMSpropWarmup",
    "StreamingDiLoCo",
    "_MultiNodeOptimizer",
    "create_multi_node_optimizer",
    "gradual_warmup",
    "keep_last_statistics",
    "linear_scaling",
    "piecewise",
    "sgd_share",
]
