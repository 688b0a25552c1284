"""Multi-node optimizers."""

from mn_optim import create_multi_node_optimizer

__all__ = ["create_multi_node_optimizer"]
