"""``MultiNodeChainList``, under the module name that scripts know."""

import chainermn  # noqa: F401 - scripts find it here

from mn_modelpar.links import MultiNodeChainList as MultiNodeChainList
