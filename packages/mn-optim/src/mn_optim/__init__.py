"""Multi-node optimizers: a Chainer optimizer whose gradients are averaged over all ranks."""

import chainer

import mn_compat  # noqa: F401 - first: it makes Chainer importable
from mn_comm import check_in_debug_mode
from mn_optim.optimizer import MultiNodeOptimizer, create_multi_node_optimizer
from mn_optim.options import Asynchronous, DiLoCo, LocalSGD, StreamingDiLoCo
from mn_optim.updater import MultiNodeUpdater

__all__ = [
    "Asynchronous",
    "DiLoCo",
    "LocalSGD",
    "MultiNodeOptimizer",
    "MultiNodeUpdater",
    "StreamingDiLoCo",
    "create_multi_node_optimizer",
]

check_in_debug_mode(chainer.is_debug)
