"""When the ranks communicate: in every step, before or during it; every few steps; or whenever the network is free."""

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
