"""Gradients in fewer bytes: data sent between nodes is compressed; data within a node is exact.

A compression is an object with settings, passed as ``send=`` to ``DuringBackward`` and others of mn_optim, or to
``gradient_reducer``. :class:`~mn_compress.compressor.Compressor` applies it. Each algorithm is one module:
:mod:`~mn_compress.int8`, :mod:`~mn_compress.one_bit`, :mod:`~mn_compress.top_k`,
:mod:`~mn_compress.power_sgd`. All of them use error feedback: the omitted part is added in the next step
(Karimireddy et al., arXiv:1901.09847). Gradients on a device are compressed there.
"""

from mn_compress.base import Compression
from mn_compress.int8 import Int8
from mn_compress.one_bit import OneBit
from mn_compress.power_sgd import PowerSGD
from mn_compress.top_k import TopK

__all__ = ["Compression", "Int8", "OneBit", "PowerSGD", "TopK"]
