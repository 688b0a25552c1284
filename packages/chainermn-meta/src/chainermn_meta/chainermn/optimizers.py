"""Multi-node optimizers."""

from mn_optim import MultiNodeOptimizer as _MultiNodeOptimizer
from mn_optim import create_multi_node_optimizer

__all__ = ["_MultiNodeOptimizer", "create_multi_node_optimizer"]
