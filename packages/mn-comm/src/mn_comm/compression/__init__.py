"""Gradients in fewer bytes: what crosses between nodes is compressed, what stays within a node is exact.

A compression is an object of numbers, passed as ``compression=`` to ``create_multi_node_optimizer`` or
``gradient_reducer``. :class:`~mn_comm.compression.compressor.Compressor` applies it; each algorithm is one module:
:mod:`~mn_comm.compression.int8`, :mod:`~mn_comm.compression.one_bit`, :mod:`~mn_comm.compression.top_k`,
:mod:`~mn_comm.compression.power_sgd`. All feed back their errors: what was left out is added in the next step
(Karimireddy et al., arXiv:1901.09847). Gradients on a device are compressed on it.
"""

from mn_comm.compression.base import Compression
from mn_comm.compression.int8 import Int8
from mn_comm.compression.one_bit import OneBit
from mn_comm.compression.power_sgd import PowerSGD
from mn_comm.compression.top_k import TopK

__all__ = ["Compression", "Int8", "OneBit", "PowerSGD", "TopK"]
