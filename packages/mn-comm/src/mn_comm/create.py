"""Communicators by name."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mn_comm import communicator as kinds
from mn_comm.communicator import Communicator
from mn_comm.config import Config

__all__ = ["create_communicator"]

_BY_NAME: dict[str, type[Communicator]] = {
    "naive": kinds.NaiveCommunicator,
    "flat": kinds.FlatCommunicator,
    "hierarchical": kinds.HierarchicalCommunicator,
    "two_dimensional": kinds.TwoDimensionalCommunicator,
    "single_node": kinds.SingleNodeCommunicator,
    "non_cuda_aware": kinds.NonCudaAwareCommunicator,
    "pure_nccl": kinds.PureNcclCommunicator,
    "dummy": kinds.DummyCommunicator,
}


def create_communicator(
    communicator_name: str = "hierarchical",
    mpi_comm: MPI.Intracomm | None = None,
    allreduce_grad_dtype: Any = None,
    batched_copy: bool = True,
) -> Communicator:
    """Create a communicator; collective.

    Args:
        communicator_name: How gradients are averaged: ``naive``, ``flat``, ``hierarchical``, ``two_dimensional``,
            ``single_node``, ``non_cuda_aware``, ``pure_nccl`` or ``dummy``. All but ``dummy`` compute the same;
            ``pure_nccl`` takes gradients on devices only, the others take them anywhere.
        mpi_comm: The ranks that take part; by default all that ``mpiexec`` started.
        allreduce_grad_dtype: The dtype in which gradients travel: float16, bfloat16 (as the string or the dtype of
            ``ml_dtypes``), float32 or float64; ``None`` for their own. Half precision is added up in float32 on the
            host; NCCL adds it up as it is, each summand divided before. (The old software took it for ``pure_nccl``
            only, and raised ValueError for the others.)
        batched_copy: Whether gradients on a device are packed by one kernel for all of them.

    Returns:
        The communicator.

    Raises:
        ValueError: There is no communicator of that name, it cannot have these settings, or it cannot work on these
            hosts.
        RuntimeError: ``pure_nccl`` was asked for and CuPy or NCCL is missing on some rank (on every rank).
        TypeError: ``mpi_comm`` or a setting is of the wrong type.
    """
    kind = _kind_of(communicator_name)
    if mpi_comm is None:
        mpi_comm = MPI.COMM_WORLD
    if not isinstance(mpi_comm, MPI.Intracomm):
        raise TypeError(f"expected an mpi4py intracommunicator for mpi_comm, got {type(mpi_comm).__name__}")
    config = Config().with_value("allreduce_grad_dtype", allreduce_grad_dtype)
    return kind(mpi_comm, config.with_value("batched_copy", batched_copy))


def _kind_of(name: str) -> type[Communicator]:
    if name not in _BY_NAME:
        raise ValueError(f"expected a communicator's name, one of {', '.join(_BY_NAME)}; got {name!r}")
    return _BY_NAME[name]
