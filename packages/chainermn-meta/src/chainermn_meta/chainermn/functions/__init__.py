"""Differentiable communication."""

from chainermn.functions import (  # noqa: F401 - scripts reach them without another import
    batch_normalization,
    collective_communication,
    point_to_point_communication,
)

# From the module, so that importing the module later does not replace the function of the same name.
from chainermn.functions.pseudo_connect import pseudo_connect as pseudo_connect

from mn_modelpar.functions import *  # noqa: F403
from mn_modelpar.functions import __all__ as _names
from mn_modelpar.functions import alltoall as all_to_all

__all__ = [*_names, "all_to_all"]
