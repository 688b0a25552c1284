"""Differentiable communication."""

from mn_modelpar.functions.collectives import allgather, allreduce, alltoall, bcast, gather, reduce_scatter, scatter
from mn_modelpar.functions.point_to_point import recv, send
from mn_modelpar.functions.pseudo_connect import pseudo_connect

__all__ = [
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
