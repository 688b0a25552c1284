"""The gradient reducer: one object per model, which owns its buckets for the model's whole life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm import wire
from mn_comm.gradients.agree import Agreement, Signature, signature_of
from mn_comm.gradients.bucket import Bucket, make_buckets
from mn_comm.gradients.select import Named, select
from mn_comm.protocols import Model
from mn_comm.strategies import Strategy

__all__ = ["GradientReducer"]


class GradientReducer:
    """Averages the gradients of one model over all ranks.

    Args:
        mpi_comm: The communicator whose ranks hold replicas of the model.
        strategy: How one buffer is averaged.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, strategy: Strategy) -> None:
        self._strategy = strategy
        self._agreement = Agreement(mpi_comm, "multi_node_mean_grad")
        self._signature: Signature = ()
        self._buckets: list[Bucket] = []

    def average(self, model: Model, zero_fill: bool) -> None:
        """Replace every gradient by its mean over all ranks; collective.

        Args:
            model: The model, after its backward pass.
            zero_fill: As for :func:`~mn_comm.gradients.select.select`.

        Raises:
            ValueError: The ranks' gradients differ in names, shapes or dtypes.
        """
        params = select(model, zero_fill)
        signature = signature_of([(name, param.grad) for name, param in params])
        self._agreement.check(signature)
        self._lay_out(signature, params)
        for bucket in self._buckets:
            bucket.pack(params)
        for bucket in self._buckets:
            self._strategy.average(bucket.wire)
        for bucket in self._buckets:
            bucket.view(params)

    def _lay_out(self, signature: Signature, params: Sequence[Named]) -> None:
        """Keep the buckets for as long as the gradients keep their names, shapes and dtypes."""
        if signature != self._signature:
            grads = [param.grad for _, param in params]
            self._buckets = make_buckets(grads, _wire_dtype, np.empty, self._strategy.one_bucket_each)
            self._signature = signature


def _wire_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return wire.sum_dtype(dtype, "multi_node_mean_grad")
