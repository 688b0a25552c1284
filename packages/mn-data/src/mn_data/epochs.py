"""Epochs in iterations, for scripts from the time before epoch triggers."""

from __future__ import annotations

import warnings
from collections.abc import Sized

from mn_comm import CommunicatorBase
from mn_comm.building_blocks import MPI


def get_n_iterations_for_one_epoch(
    dataset: Sized, local_batch_size: int, comm: CommunicatorBase | MPI.Intracomm
) -> int:
    """Return how many iterations an epoch of rank 0 takes; collective. Deprecated: use epoch triggers.

    Args:
        dataset: This rank's part of the dataset.
        local_batch_size: The samples of each rank's mini-batch.
        comm: A communicator, or an mpi4py one.

    Returns:
        The number of iterations on rank 0, returned on every rank.
    """
    warnings.warn("deprecated: use epoch triggers", DeprecationWarning, stacklevel=2)
    return _n_iterations(dataset, local_batch_size, comm)


def get_epoch_trigger(
    n_epochs: int, dataset: Sized, local_batch_size: int, comm: CommunicatorBase | MPI.Intracomm
) -> tuple[int, str]:
    """Return a trigger that fires after ``n_epochs`` epochs of rank 0; collective. Deprecated: use epoch triggers.

    Args:
        n_epochs: How many epochs.
        dataset: This rank's part of the dataset.
        local_batch_size: The samples of each rank's mini-batch.
        comm: A communicator, or an mpi4py one.

    Returns:
        A number of iterations, and ``"iteration"``.
    """
    warnings.warn("deprecated: use epoch triggers", DeprecationWarning, stacklevel=2)
    return n_epochs * _n_iterations(dataset, local_batch_size, comm), "iteration"


def _n_iterations(dataset: Sized, local_batch_size: int, comm: CommunicatorBase | MPI.Intracomm) -> int:
    mine = -(-len(dataset) // local_batch_size) if comm.rank == 0 else None
    if not isinstance(comm, MPI.Intracomm):
        return int(comm.bcast_obj(mine))
    from mn_comm.building_blocks import Ranks  # not at import, because it starts MPI

    return int(Ranks(comm).bcast(mine))
