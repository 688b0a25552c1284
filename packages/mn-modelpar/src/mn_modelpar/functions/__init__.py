"""Differentiable communication; one file for each pair of adjoint functions."""

from mn_modelpar.functions.allgather import allgather, reduce_scatter
from mn_modelpar.functions.allreduce import allreduce
from mn_modelpar.functions.alltoall import alltoall
from mn_modelpar.functions.bcast import bcast
from mn_modelpar.functions.gather import gather, scatter
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
