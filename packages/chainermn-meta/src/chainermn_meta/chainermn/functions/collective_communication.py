"""Collective functions, under the module name that scripts know."""

from mn_modelpar.functions import allgather, allreduce, alltoall, bcast, gather, reduce_scatter, scatter

__all__ = ["allgather", "allreduce", "alltoall", "bcast", "gather", "reduce_scatter", "scatter"]
