"""Collective functions, under the module name that scripts know."""

from mn_modelpar.functions import (  # noqa: F401 - __all__ contains what is imported here
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    reduce_scatter,
    scatter,
)
from mn_modelpar.functions import alltoall as all_to_all  # noqa: F401 - its name in ChainerMN 1.0
from mn_modelpar.functions.function_objects import AllGather, AllToAll, Bcast, Gather, Scatter  # noqa: F401

__all__ = [name for name in dir() if not name.startswith("__")]
