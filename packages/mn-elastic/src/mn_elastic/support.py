"""Whether this job can survive the loss of a rank, and which features an elastic communicator does not have."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mn_comm.registry import SPARES
from mn_guard.job import ENABLED, detects, is_tolerant

__all__ = ["SPARES", "is_minority", "n_spares", "problem_of"]

_CURE = "start the job by Open MPI's `mpiexec --with-ft ulfm`, or do without elastic=True"


def problem_of(library: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why a job cannot continue after a rank has died, and what to change; ``None`` if it can.

    Args:
        library: The MPI library's description of itself.
        environ: The environment of a process of the job.
    """
    name = " ".join(library.splitlines()[0].split(",")[0].split())
    if not name.startswith("Open MPI"):
        return f"elastic=True: expected Open MPI 5, which can continue after a rank has died; got {name:.40}: {_CURE}"
    if not is_tolerant(environ):
        return f"elastic=True: expected a job started with fault tolerance, but {ENABLED} is not 1: {_CURE}"
    return None


def is_minority(left: int, before: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the remaining ranks must end, because they are not the majority; only with the failure detector.

    The other ranks may then be alive, and regard these as dead.

    Args:
        left: How many ranks remain.
        before: How many ranks there were before.
        environ: The environment of a process of the job.
    """
    return detects(environ) and 2 * left <= before


def n_spares(size: int, text: str) -> int:
    """Return how many processes wait as spares.

    Args:
        size: How many processes there are.
        text: The value of the variable; empty if it is not set.

    Raises:
        ValueError: The text is not a number, or no process would train.
    """
    text = text or "0"
    if not text.isdecimal() or not int(text) < size:
        raise ValueError(f"expected 0 to {size - 1} for {SPARES}, in a job of {size} processes; got {text!r}")
    return int(text)
