"""How the mean of a buffer over all ranks is computed: one way, one file.

The name of a communicator chooses its strategy. All of them compute the same numbers, up to rounding; ``naive`` is the
reference.
"""

from mn_comm.strategies.dummy import Dummy
from mn_comm.strategies.flat import Flat
from mn_comm.strategies.hierarchical import Hierarchical
from mn_comm.strategies.naive import Naive
from mn_comm.strategies.non_cuda_aware import NonCudaAware
from mn_comm.strategies.pure_nccl import PureNccl
from mn_comm.strategies.single_node import SingleNode
from mn_comm.strategies.strategy import Strategy
from mn_comm.strategies.two_dimensional import TwoDimensional

__all__ = [
    "Dummy",
    "Flat",
    "Hierarchical",
    "Naive",
    "NonCudaAware",
    "PureNccl",
    "SingleNode",
    "Strategy",
    "TwoDimensional",
]
