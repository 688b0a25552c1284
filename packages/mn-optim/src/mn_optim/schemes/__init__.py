"""When the ranks meet: in every step, before it or beside it; in every so many steps; or whenever the network can."""

from mn_optim.schemes.asynchronous import AsynchronousMean
from mn_optim.schemes.exact import AfterBackward, DoubleBuffered, Exact, Overlapped
from mn_optim.schemes.local_steps import LocalSteps
from mn_optim.schemes.scheme import Backward, Scheme
from mn_optim.schemes.sharded import Sharded

__all__ = [
    "AfterBackward",
    "AsynchronousMean",
    "Backward",
    "DoubleBuffered",
    "Exact",
    "LocalSteps",
    "Overlapped",
    "Scheme",
    "Sharded",
]
