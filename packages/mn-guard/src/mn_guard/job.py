"""What launchers, and users, say about a job in the environment of its processes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Where they say which rank in ``MPI_COMM_WORLD`` a process will be."""

ENABLED = "OMPI_MCA_mpi_ft_enable"
"""What ``mpiexec --with-ft ulfm`` sets to 1 in every process."""
_DETECTOR = "OMPI_MCA_mpi_ft_detector"


def is_tolerant(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher lets the other processes continue after one has died."""
    return environ.get(ENABLED, "") in ("1", "true")


def detects(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI's failure detector is on, which regards silent ranks as dead."""
    return environ.get(_DETECTOR, "") in ("1", "true")


def leads_its_processes() -> bool:
    """Return whether the launcher has given this process a group of its own, which contains all that it starts."""
    return os.getpgrp() == os.getpid()


def as_number(text: str) -> float:
    """Return the number in the value of a variable; NaN, which is in no range, if there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
