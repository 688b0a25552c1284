"""Send and receive, under the module name that scripts know."""

from mn_modelpar.functions import recv, send
from mn_modelpar.functions.function_objects import Recv, Send

__all__ = ["Recv", "Send", "recv", "send"]
