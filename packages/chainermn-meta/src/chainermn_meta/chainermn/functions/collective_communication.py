"""Collective functions, under the module name that scripts know."""

from mn_modelpar.functions import allgather, allreduce, alltoall, bcast, gather, reduce_scatter, scatter
from mn_modelpar.functions.function_objects import AllGather, AllToAll, Bcast, Gather, Scatter

all_to_all = alltoall  # its name in ChainerMN 1.0

__all__ = [
    "AllGather",
    "AllToAll",
    "Bcast",
    "Gather",
    "Scatter",
    "all_to_all",
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "gather",
    "reduce_scatter",
    "scatter",
]
