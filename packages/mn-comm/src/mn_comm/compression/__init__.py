"""Gradients in fewer bytes: data sent between nodes is compressed; data within a node is exact.

A compression is an object with settings, passed as ``compression=`` to ``create_multi_node_optimizer`` or
``gradient_reducer``. :class:`~mn_comm.compression.compressor.Compressor` applies it. Each algorithm is one module:
:mod:`~mn_comm.compression.int8`, :mod:`~mn_comm.compression.one_bit`, :mod:`~mn_comm.compression.top_k`,
:mod:`~mn_comm.compression.power_sgd`. All of them use error feedback: the omitted part is added in the next step
(Karimireddy et al., arXiv:1901.09847). Gradients on a device are compressed there.
"""

from mn_comm.compression.compression import Compression
from mn_comm.compression.int8 import Int8
from mn_comm.compression.one_bit import OneBit
from mn_comm.compression.power_sgd import PowerSGD
from mn_comm.compression.top_k import TopK

__all__ = ["Compression", "Int8", "OneBit", "PowerSGD", "TopK"]
