"""When the ranks communicate: in every step, before or during it; every few steps; or whenever the network is free."""

from mn_optim.schemes.asynchronous import AsynchronousMean
from mn_optim.schemes.local_steps import LocalSteps
from mn_optim.schemes.scheme import Backward, Scheme
from mn_optim.schemes.sharded_steps import ShardedSteps
from mn_optim.schemes.synchronous import DoubleBuffered, Overlapped, Plain, Synchronous
from mn_optim.schemes.two_phases import TwoPhases

__all__ = [
    "AsynchronousMean",
    "Backward",
    "DoubleBuffered",
    "LocalSteps",
    "Overlapped",
    "Plain",
    "Scheme",
    "ShardedSteps",
    "Synchronous",
    "TwoPhases",
]
