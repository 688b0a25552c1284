"""Models that span processes: differentiable communication, chain lists, batch normalisation over all ranks."""

import mn_compat  # noqa: F401 - first: it makes Chainer importable
from mn_modelpar import functions, links
from mn_modelpar.links import MultiNodeChainList

__all__ = ["MultiNodeChainList", "functions", "links"]
