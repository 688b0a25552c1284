"""The gradient reducer: one object per model, which owns its buckets for the model's whole life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm.arithmetic import is_half
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
        self._layout: tuple[Signature, np.dtype[Any] | None] = ((), None)
        self._buckets: list[Bucket] = []

    def average(self, model: Model, zero_fill: bool, wire_dtype: np.dtype[Any] | None) -> None:
        """Replace every gradient by its mean over all ranks; collective.

        Args:
            model: The model, after its backward pass.
            zero_fill: As for :func:`~mn_comm.gradients.select.select`.
            wire_dtype: The dtype in which gradients travel; ``None`` for their own.

        Raises:
            ValueError: The ranks' gradients differ in names, shapes or dtypes.
            TypeError: A gradient does not hold floats (on every rank).
        """
        params = select(model, zero_fill)
        signature = signature_of([(name, param.grad) for name, param in params])
        self._agreement.start(signature)
        if (signature, wire_dtype) == self._layout:
            # While the ranks agree, or find out that they do not: packing touches nothing but this rank's memory.
            self._pack(params)
            self._agreement.finish()
        else:
            self._agreement.finish()
            self._lay_out(signature, wire_dtype, params)
            self._pack(params)
        for bucket in self._buckets:
            self._strategy.average(bucket.buffer)
        for bucket in self._buckets:
            bucket.view(params)

    def _pack(self, params: Sequence[Named]) -> None:
        for bucket in self._buckets:
            bucket.pack(params)

    def _lay_out(self, signature: Signature, wire_dtype: np.dtype[Any] | None, params: Sequence[Named]) -> None:
        """Make buckets, to be kept for as long as the gradients keep their names, shapes and dtypes."""
        for name, _, dtype in signature:
            if not _is_float(dtype):
                raise TypeError(f"multi_node_mean_grad: expected gradients of floats, got dtype {dtype} for {name}")
        self._layout = (signature, wire_dtype)
        self._buckets = []  # first: the memory of the old ones may be needed for the new
        self._buckets = make_buckets(
            [param.grad for _, param in params],
            lambda dtype: wire_dtype or dtype,
            self._strategy.allocate,
            self._strategy.one_bucket_each,
        )


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or is_half(dtype)
