"""Helpers for communicators that scripts define: ranks, and communicators derived from MPI's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from chainermn import nccl

from mn_comm import CommunicatorBase, create_communicator

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "INT_MAX",
    "_get_nccl_type_id",
    "chunked_bcast_obj",
    "init_inter_mpi_comm",
    "init_intra_mpi_comm",
    "init_nccl_comm",
    "init_ranks",
]

INT_MAX = 2**31 - 1
_DEFAULT_MAX_BUF_LEN = 256 * 1024 * 1024
_NCCL_TYPES = {"float16": nccl.NCCL_FLOAT16, "float32": nccl.NCCL_FLOAT32, "float64": nccl.NCCL_FLOAT64}


def init_ranks(mpi_comm: MPI.Intracomm) -> tuple[int, int, int, int, int]:
    """Return rank, intra_rank, intra_size, inter_rank and inter_size; collective."""
    comm = create_communicator("naive", mpi_comm)
    return comm.rank, comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size


def init_intra_mpi_comm(mpi_comm: MPI.Intracomm, intra_rank: int, inter_rank: int) -> MPI.Intracomm:
    """Return the ranks of this host; collective."""
    return cast("MPI.Intracomm", mpi_comm.Split(inter_rank, intra_rank))


def init_inter_mpi_comm(mpi_comm: MPI.Intracomm, intra_rank: int, inter_rank: int) -> MPI.Intracomm:
    """Return the ranks of this ``intra_rank`` on all hosts; collective."""
    return cast("MPI.Intracomm", mpi_comm.Split(intra_rank, inter_rank))


def init_nccl_comm(mpi_comm: MPI.Intracomm) -> nccl.NcclCommunicator:
    """Return NCCL's communicator over the current devices of all ranks; collective.

    Raises:
        RuntimeError: CuPy or NCCL is missing.
    """
    unique_id = mpi_comm.bcast(nccl.get_unique_id() if mpi_comm.rank == 0 else None)
    return nccl.NcclCommunicator(mpi_comm.size, unique_id, mpi_comm.rank)


def chunked_bcast_obj(
    obj: Any, mpi_comm: CommunicatorBase | MPI.Intracomm, max_buf_len: int = _DEFAULT_MAX_BUF_LEN, root: int = 0
) -> Any:
    """Broadcast an object; collective.

    Args:
        obj: At the root anything that can be pickled, of any size; ignored elsewhere.
        mpi_comm: The ranks.
        max_buf_len: The maximum number of bytes to pass to MPI at once.
        root: The rank that has the object.
    """
    comm = mpi_comm if isinstance(mpi_comm, CommunicatorBase) else create_communicator("naive", mpi_comm)
    return comm.bcast_obj(obj, max_buf_len, root)


def _get_nccl_type_id(dtype: Any) -> int:
    """Return NCCL's constant for a floating dtype.

    Raises:
        ValueError: It is a different dtype.
    """
    name = np.dtype(dtype).name
    if name not in _NCCL_TYPES:
        raise ValueError(f"expected float16, float32 or float64, got {name}")
    return _NCCL_TYPES[name]
