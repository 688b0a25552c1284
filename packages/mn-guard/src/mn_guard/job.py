"""How Open MPI's launcher was told to treat the death of a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["ENABLED", "detects", "is_tolerant"]

ENABLED = "OMPI_MCA_mpi_ft_enable"
"""What ``mpiexec --with-ft ulfm`` sets to 1 in every process."""
_DETECTOR = "OMPI_MCA_mpi_ft_detector"


def is_tolerant(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher lets the other processes continue after one has died."""
    return environ.get(ENABLED, "") in ("1", "true")


def detects(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI's failure detector is on, which regards silent ranks as dead."""
    return environ.get(_DETECTOR, "") in ("1", "true")
