"""The collectives, for arrays in host memory or on a device.

Each takes :class:`~mn_comm.ranks.intracomm.Ranks`.
"""

from mn_comm.collectives.arrays import allgather, alltoall, bcast, bcast_in_place, gather, recv, scatter, send
from mn_comm.collectives.halving import mean_to_each, order_of_ranges
from mn_comm.collectives.mean import combine_in_place, mean_in_place
from mn_comm.collectives.objects import (
    allgather_obj,
    allreduce_obj,
    bcast_obj,
    gather_obj,
    recv_obj,
    scatter_obj,
    send_obj,
)
from mn_comm.collectives.reductions import allreduce, reduce, reduce_scatter
from mn_comm.collectives.transport import Transport

__all__ = [
    "Transport",
    "allgather",
    "allgather_obj",
    "allreduce",
    "allreduce_obj",
    "alltoall",
    "bcast",
    "bcast_in_place",
    "bcast_obj",
    "combine_in_place",
    "gather",
    "gather_obj",
    "mean_in_place",
    "mean_to_each",
    "order_of_ranges",
    "recv",
    "recv_obj",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_obj",
    "send",
    "send_obj",
]
