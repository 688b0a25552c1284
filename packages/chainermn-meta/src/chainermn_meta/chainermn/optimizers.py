"""Multi-node optimizers."""

from mn_optim import Asynchronous, DiLoCo, LocalSGD, StreamingDiLoCo, create_multi_node_optimizer
from mn_optim import MultiNodeOptimizer as _MultiNodeOptimizer

__all__ = [
    "Asynchronous",
    "DiLoCo",
    "LocalSGD",
    "StreamingDiLoCo",
    "_MultiNodeOptimizer",
    "create_multi_node_optimizer",
]
