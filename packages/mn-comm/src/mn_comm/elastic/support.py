"""Whether this job can survive the loss of a rank, and which features an elastic communicator does not have."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["ENABLED", "SPARES", "detects", "is_minority", "is_tolerant", "n_spares", "problem_of", "refuse_spares"]

ENABLED = "OMPI_MCA_mpi_ft_enable"
"""What ``mpiexec --with-ft ulfm`` sets to 1 in every process."""
_DETECTOR = "OMPI_MCA_mpi_ft_detector"
SPARES = "CHAINERMN_SPARES"
"""The variable that says how many of the processes that the launcher starts wait until a rank is lost."""
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


def is_tolerant(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher lets the other processes continue after one has died."""
    return environ.get(ENABLED, "") in ("1", "true")


def detects(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI's failure detector is on, which regards silent ranks as dead."""
    return environ.get(_DETECTOR, "") in ("1", "true")


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


def refuse_spares(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if spares were requested, but the job has no elastic communicator."""
    if environ.get(SPARES, "") in ("", "0"):
        return
    from mn_comm.elastic import ends

    if not ends.is_shared():
        raise ValueError(
            f"expected create_communicator(…, elastic=True) with {SPARES}={environ[SPARES]}, got elastic=False: no "
            "process can take the place of a rank that is lost"
        )
