"""Whether this job can survive the loss of a rank, and which features an elastic communicator does not have."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["ENABLED", "problem_of"]

ENABLED = "OMPI_MCA_mpi_ft_enable"
"""What ``mpiexec --with-ft ulfm`` sets to 1 in every process."""
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
    if environ.get(ENABLED, "") not in ("1", "true"):
        return f"elastic=True: expected a job started with fault tolerance, but {ENABLED} is not 1: {_CURE}"
    return None
