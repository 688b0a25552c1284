"""When the ranks communicate: in every step, before or during it; every few steps; or whenever the network is free."""

from mn_optim.schemes.asynchronous import AsynchronousMean
from mn_optim.schemes.local_steps import LocalSteps
from mn_optim.schemes.scheme import Backward, Scheme
from mn_optim.schemes.sharded import Sharded
from mn_optim.schemes.synchronous import AfterBackward, DoubleBuffered, Overlapped, Synchronous

__all__ = [
    "AfterBackward",
    "AsynchronousMean",
    "Backward",
    "DoubleBuffered",
    "LocalSteps",
    "Overlapped",
    "Scheme",
    "Sharded",
    "Synchronous",
]
