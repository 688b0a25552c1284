"""``MultiNodeChainList``, under the module name that scripts know."""

from mn_modelpar.links import MultiNodeChainList

__all__ = ["MultiNodeChainList"]
