"""How long-lasting MPI operations wait: at once in the main thread, with pauses in any other.

A blocking MPI call spins until it is done. In the main thread that is the fastest way to wait. A thread that averages
gradients in the background would take the core away from the computation that it is meant to hide behind; it asks now
and then instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

__all__ = ["call", "wait"]

# Shorter pauses make more progress on a slow network, longer ones leave more of the core to the computation.
_PAUSE_SECONDS = 50e-6


def call(blocking: Callable[..., Any], nonblocking: Callable[..., MPI.Request], *args: Any) -> None:
    """Run an MPI operation to its end.

    Args:
        blocking: The operation.
        nonblocking: Its nonblocking form, which takes the same arguments.
        args: The arguments.
    """
    if _in_main_thread():
        blocking(*args)
    else:
        wait(nonblocking(*args))


def wait(request: MPI.Request) -> None:
    """Wait for the end of a nonblocking MPI operation."""
    if _in_main_thread():
        request.Wait()
        return
    while not request.Test():
        time.sleep(_PAUSE_SECONDS)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
