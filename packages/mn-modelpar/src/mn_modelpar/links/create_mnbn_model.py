"""Replacing the batch normalisation of a model by batch normalisation over all ranks."""

from __future__ import annotations

import copy
from typing import Any

import chainer

from mn_comm import CommunicatorBase
from mn_modelpar.links.batch_normalization import MultiNodeBatchNormalization, check_backend


def create_mnbn_model(link: chainer.Link, comm: CommunicatorBase, communication_backend: str = "auto") -> chainer.Link:
    """Copy a model, with every BatchNormalization replaced by a MultiNodeBatchNormalization.

    Args:
        link: The model: any link, or a BatchNormalization itself. It is not changed.
        comm: The ranks whose batches belong together.
        communication_backend: ``auto`` or ``mpi``, and for ``pure_nccl`` also ``nccl``; the statistics are always sent
            by MPI.

    Returns:
        A deep copy. Links that are replaced, at any depth, keep their parameters, running statistics, settings and
        hooks. Links of classes that compute something else, such as BatchRenormalization, are copied as they are.

    Raises:
        ValueError: There is no such backend, or this communicator cannot use it.

    Example:
        >>> model = chainer.Sequential(L.Linear(4, 3), L.BatchNormalization(3))
        >>> type(chainermn.links.create_mnbn_model(model, comm)[1]).__name__
        'MultiNodeBatchNormalization'
    """
    check_backend(communication_backend, comm)
    memo: dict[int, Any] = {id(comm): comm}
    chainers = chainer.links.BatchNormalization
    for part in link.links():
        if isinstance(part, chainers) and type(part).forward is chainers.forward:
            # deepcopy finds it in the memo, and uses it wherever the original is referred to.
            memo[id(part)] = _over_all_ranks(part, comm)
    return copy.deepcopy(link, memo)


def _over_all_ranks(link: chainer.links.BatchNormalization, comm: CommunicatorBase) -> MultiNodeBatchNormalization:
    twin = MultiNodeBatchNormalization.__new__(MultiNodeBatchNormalization)
    twin.__dict__.update(copy.deepcopy(link.__dict__))
    twin.comm = comm
    return twin
