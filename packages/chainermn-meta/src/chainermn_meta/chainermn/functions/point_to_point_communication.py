"""Send and receive, under the module name that scripts know."""

from mn_modelpar.functions import recv, send

__all__ = ["recv", "send"]
