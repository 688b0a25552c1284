"""What launchers, and users, say about a job in the environment of its processes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Where they say which rank in ``MPI_COMM_WORLD`` a process will be."""

LAUNCHERS = ("prterun", "prted")
"""The names of Open MPI's processes that start ranks."""

BY_SIGNAL = 128
"""A shell's exit status for a process that was ended by a signal is this and the signal's number."""

ENABLED = "OMPI_MCA_mpi_ft_enable"
"""What ``mpiexec --with-ft ulfm`` sets to 1 in every process."""
_DETECTOR = "OMPI_MCA_mpi_ft_detector"


def is_tolerant(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher lets the other processes continue after one has died."""
    return environ.get(ENABLED, "") in ("1", "true")


def detects(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI's failure detector is on, which regards silent ranks as dead."""
    return environ.get(_DETECTOR, "") in ("1", "true")


def name_and_parent(process: int) -> tuple[str, int]:
    """Return the name of a process of this host, and the process ID of its parent.

    Raises:
        OSError: There is no such process.
    """
    with open(f"/proc/{process}/stat", errors="replace") as file:
        name, _, rest = file.read().partition("(")[2].rpartition(")")
    return name, int(rest.split()[1])


def leads_its_processes() -> bool:
    """Return whether Open MPI's launcher has given this process a group of its own, which contains all that it starts.

    With ``srun``, all ranks of a node are in one group, which the first of them leads.
    """
    try:
        return os.getpgrp() == os.getpid() and name_and_parent(os.getppid())[0] in LAUNCHERS
    except (OSError, ValueError):  # in a container, the launcher may be outside
        return False


def as_number(text: str) -> float:
    """Return the number in the value of a variable; NaN, which is in no range, if there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
