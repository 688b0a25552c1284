"""Differentiable communication."""

from chainermn.functions import batch_normalization  # noqa: F401 - scripts reach it without another import

# From the modules, so that importing a module later does not replace the function of the same name.
from chainermn.functions.collective_communication import (
    all_to_all,
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    reduce_scatter,
    scatter,
)
from chainermn.functions.point_to_point_communication import recv, send
from chainermn.functions.pseudo_connect import pseudo_connect

__all__ = [
    "all_to_all",
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "gather",
    "pseudo_connect",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]
