"""Batch normalisation over all ranks, as a link."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import chainer
import numpy as np

from mn_comm import CommunicatorBase
from mn_comm.communicators import PureNcclCommunicator
from mn_modelpar.functions.batch_normalization import MultiNodeBatchNormalizationFunction
from mn_modelpar.links.copying import deepcopy_sharing


class MultiNodeBatchNormalization(chainer.links.BatchNormalization):  # type: ignore[misc]  # Chainer has no types
    """Chainer's batch normalisation, with the statistics of the batches of all ranks together.

    In training, every rank must call it. Local batches may differ in size, and some may be empty; the result is that of
    Chainer's link on the concatenation of all batches. The gradients of ``gamma`` and ``beta`` are means over ranks,
    equal on all ranks.

    Args:
        size: The shape of the channels; an integer for one axis.
        comm: The ranks whose batches belong together.
        decay: How much of the running statistics is kept in each pass.
        eps: Added to the variance.
        dtype: The dtype of statistics and parameters; by default Chainer's, and float32 for mixed16.
        use_gamma: Whether there is a factor for each channel.
        use_beta: Whether there is a summand for each channel.
        initial_gamma: Its initial value; by default 1.
        initial_beta: Its initial value; by default 0.
        communication_backend: ``auto`` or ``mpi``, and for ``pure_nccl`` also ``nccl``. It is accepted for old scripts,
            but has no effect: the statistics, a few numbers for each channel, are always sent by MPI.
        axis: The axes to reduce over; by default all but the second one.

    Raises:
        ValueError: There is no such backend, or this communicator cannot use it.

    Example:
        >>> bn = chainermn.links.MultiNodeBatchNormalization(3, comm)
        >>> bn(np.full((2, 3), comm.rank, np.float32)).shape
        (2, 3)
    """

    def __init__(
        self,
        size: int | tuple[int, ...] | None,
        comm: CommunicatorBase,
        decay: float = 0.9,
        eps: float = 2e-5,
        dtype: Any = None,
        use_gamma: bool = True,
        use_beta: bool = True,
        initial_gamma: Any = None,
        initial_beta: Any = None,
        communication_backend: str = "auto",
        *,
        axis: int | tuple[int, ...] | None = None,
    ) -> None:
        check_backend(communication_backend, comm)
        super().__init__(size, decay, eps, dtype, use_gamma, use_beta, initial_gamma, initial_beta, axis)
        self.comm = comm

    def forward(self, x: Any, finetune: bool = False) -> chainer.Variable:
        """Normalise; in training collective: every rank must call.

        Args:
            x: A Variable or array of floats, of shape ``(batch, *size, ...)``; the batch may differ between ranks.
            finetune: Whether, in training, the running statistics become the plain mean over all passes since
                ``start_finetuning``.

        Returns:
            A Variable of the same shape and dtype.

        Raises:
            TypeError: On some rank, ``x`` does not contain floats (on every rank).
            ValueError: On some rank, its channels do not match this link (``TypeError`` on the others).
        """
        if not chainer.config.train:
            return super().forward(x)
        x = chainer.as_variable(x)
        try:
            self._check(x)
        except (TypeError, ValueError):
            # The other ranks wait in the reduction, or will: they must raise, too.
            with suppress(TypeError):
                self.comm.allreduce(None)
            raise
        if self.avg_mean is None:
            self._initialize_params(tuple(n for i, n in enumerate(x.shape) if i not in self.axis))
        gamma = self._get_gamma()[0] if self.gamma is None else self.gamma
        beta = self._get_beta()[0] if self.beta is None else self.beta
        update = not chainer.config.in_recomputing  # otherwise this pass has been counted already
        if finetune and update:
            self.N += 1
        function = MultiNodeBatchNormalizationFunction(
            self.comm,
            self.eps,
            self.avg_mean if update else None,
            self.avg_var if update else None,
            1 - 1 / self.N if finetune else self.decay,
            self.axis,
        )
        return function.apply((x, gamma, beta))[0]

    def _check(self, x: chainer.Variable) -> None:
        if np.dtype(x.dtype).kind != "f":
            raise TypeError(f"expected floats to normalise, got dtype {x.dtype}")
        if self.avg_mean is None:
            return
        size = self.avg_mean.shape
        axis = (0, *range(len(size) + 1, x.ndim)) if self.axis is None else self.axis
        channels = tuple(n for i, n in enumerate(x.shape) if i not in axis)
        if channels != size:
            raise ValueError(f"expected channels of shape {size}, got {channels} in an input of shape {x.shape}")

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeBatchNormalization:
        return deepcopy_sharing(self, self.comm, memo)


def check_backend(name: str, comm: CommunicatorBase) -> None:
    """Raise unless a backend can be used for statistics.

    Raises:
        ValueError: There is no such backend, or this communicator cannot use it.
    """
    if name not in ("auto", "mpi", "nccl"):
        raise ValueError(f"expected 'auto', 'mpi' or 'nccl' for communication_backend, got {name!r}")
    if name == "nccl" and not isinstance(comm, PureNcclCommunicator):
        raise ValueError(
            f"expected 'auto' or 'mpi' for communication_backend, got 'nccl', which {type(comm).__name__} cannot use"
        )
