"""Distributed training for Chainer: everything that the other packages offer, under the names that scripts use."""

from chainermn_meta.command import is_command

# `python -m chainermn doctor` must speak where MPI or Chainer cannot be imported.
if not is_command(__name__):
    from chainermn import (
        communicators,
        datasets,
        extensions,
        functions,
        global_except_hook,
        iterators,
        links,
        nccl,
        optimizers,
        testing,
    )
    from chainermn.communicators import CommunicatorBase, create_communicator
    from chainermn.datasets import (
        DataSizeError,
        get_epoch_trigger,
        get_n_iterations_for_one_epoch,
        scatter_dataset,
        scatter_index,
    )
    from chainermn.extensions import create_multi_node_checkpointer, create_multi_node_evaluator
    from chainermn.links import MultiNodeChainList

    from mn_optim import MultiNodeUpdater, create_multi_node_optimizer

    global_except_hook.add_hook_if_enabled()

__all__ = [
    "CommunicatorBase",
    "DataSizeError",
    "MultiNodeChainList",
    "MultiNodeUpdater",
    "communicators",
    "create_communicator",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "datasets",
    "extensions",
    "functions",
    "get_epoch_trigger",
    "get_n_iterations_for_one_epoch",
    "global_except_hook",
    "iterators",
    "links",
    "nccl",
    "optimizers",
    "scatter_dataset",
    "scatter_index",
    "testing",
]

__version__ = "8.0.0a1"
