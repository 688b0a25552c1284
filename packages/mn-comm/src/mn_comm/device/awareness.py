"""Whether MPI may be given the address of an array on a device.

An MPI library that is not CUDA-aware reads such an address as one of host memory, and the process dies. So addresses
are passed only if the library itself, or the user, says that it is CUDA-aware.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from mn_comm.basis.mpi import MPI
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

SETTING = "MN_COMM_CUDA_AWARE_MPI"  # 1 for an MPI library that is CUDA-aware, 0 for one that is not; unset to ask it
_QUERY = "MPIX_Query_cuda_support"


def is_cuda_aware(ranks: Ranks) -> bool:
    """Return whether MPI is CUDA-aware on every rank; all raise if a setting is neither 0 nor 1; collective."""
    aware = False
    with agreement.raise_on_all(ranks):
        aware = _here()
    return not ranks.any(not aware)


def _here() -> bool:
    setting = os.environ.get(SETTING, "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"expected 0 or 1 in {SETTING}, got {setting!r}")
    return setting == "1" if setting else _library_says_so()


def _library_says_so() -> bool:
    """Call a function of Open MPI that MPICH has as well; the MPI standard has none."""
    query = getattr(ctypes.CDLL(MPI.__file__), _QUERY, None)  # also searches the libraries that mpi4py is linked with
    return query is not None and bool(query())
