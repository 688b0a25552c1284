"""Batch normalisation with the statistics of the batches of all ranks together."""

from __future__ import annotations

import string
from typing import Any

import chainer
import numpy as np
from chainer import backend

from mn_comm import CommunicatorBase
from mn_compat.helpers import statistics
from mn_modelpar.functions.ordered import Ordered
from mn_modelpar.staging import to_device_of, to_host

_Array = np.ndarray[Any, Any]


def combine(communicator: CommunicatorBase, count: int, mean: _Array, squares: _Array) -> tuple[float, _Array, _Array]:
    """Combine count, means and squared deviations of all ranks' parts into those of the whole; collective.

    Squares of deviations are added up, never squares of the values, so that there is no cancellation. See Chan, Golub
    and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979, equation 2.1. It
    takes two reductions, because the deviations are from the mean over all ranks. The amount of data does not depend on
    the number of ranks.

    Args:
        communicator: The ranks.
        count: How many samples this rank has; may be 0.
        mean: Their means, of shape ``(channels,)``.
        squares: The sums of their squared deviations from these means, in the same layout.

    Returns:
        The same for the samples of all ranks, in float64.
    """
    total = communicator.allreduce(np.concatenate([[count], count * mean.astype(np.float64)]))
    whole_count, whole_mean = float(total[0]), total[1:] / max(total[0], 1.0)
    return whole_count, whole_mean, communicator.allreduce(squares + count * (mean - whole_mean) ** 2)


class Layout:
    """Which axes of the input are reduced over, and which ones are channels.

    Args:
        ndim: The number of axes of the input.
        channel_ndim: The number of axes of ``gamma``.
        axis: The axes to reduce over; by default the first one and those after the channels.
    """

    def __init__(self, ndim: int, channel_ndim: int, axis: tuple[int, ...] | None) -> None:
        self.axis = (0, *range(channel_ndim + 1, ndim)) if axis is None else axis
        self.expander = tuple(None if i in self.axis else slice(None) for i in range(ndim))
        letters = string.ascii_letters[:ndim]
        channels = "".join(letter for i, letter in enumerate(letters) if i not in self.axis)
        self._products = f"{letters},{letters}->{channels}"

    def sum_of_products(self, xp: Any, a: Any, b: Any) -> Any:
        """Return the sums of ``a * b``, of one dtype, over all but the channels."""
        if xp is np:
            return np.einsum(self._products, a, b)
        return statistics.total(a * b, self.axis, a.dtype)  # on a device, einsum takes longer


class MultiNodeBatchNormalizationFunction(Ordered):
    """Normalises by the mean and the variance over the batches of all ranks.

    The gradient of the input is that of the sum of all ranks' losses. The gradients of ``gamma`` and ``beta`` are means
    over ranks, equal on all ranks, so that averaging them again changes nothing.

    Args:
        communicator: The ranks whose batches belong together.
        eps: Added to the variance.
        running_mean: Updated in place if given, of the shape of ``gamma``.
        running_var: Updated in place if given, of the shape of ``gamma``.
        decay: How much of the running statistics is kept.
        axis: The axes to reduce over, as in :func:`chainer.functions.batch_normalization`.

    Within ``chainer.using_config("multi_node_no_samples", True)``, this rank's samples do not count, as if
    there were none. This is for ranks that have run out of data.
    """

    def __init__(
        self,
        communicator: CommunicatorBase,
        eps: float,
        running_mean: Any,
        running_var: Any,
        decay: float,
        axis: tuple[int, ...] | None,
    ) -> None:
        super().__init__()
        self.communicator = communicator
        self.eps = eps
        self.running_mean = running_mean
        self.running_var = running_var
        self.decay = decay
        self.axis = axis
        self.counts = not getattr(chainer.config, "multi_node_no_samples", False)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Normalise; collective, two reductions."""
        self.retain_inputs((0, 1))
        x, gamma, beta = inputs
        xp = backend.get_array_module(x)
        self.dtype = np.promote_types(np.promote_types(x.dtype, gamma.dtype), np.float32)
        self.layout = Layout(x.ndim, gamma.ndim, self.axis)
        count, local_mean, deviations, squares = self._local(xp, x)
        self.count, mean, total_squares = combine(
            self.communicator, count, to_host(local_mean).ravel(), to_host(squares).ravel()
        )
        var = total_squares / max(self.count, 1.0)
        self._update_running(mean.reshape(gamma.shape), var.reshape(gamma.shape))
        self.mean = self._on_device(x, mean, gamma.shape)
        self.inv_std = self._on_device(x, 1 / np.sqrt(var + self.eps), gamma.shape)
        # y = gamma (x - mean) / std + beta; x - local_mean has been computed already.
        scale = gamma * self.inv_std
        shift = beta + scale * (local_mean - self.mean)
        expander = self.layout.expander
        deviations *= scale.astype(self.dtype)[expander]
        deviations += shift.astype(self.dtype)[expander]
        return (deviations.astype(x.dtype, copy=False),)

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the gradients of input, gamma and beta; collective, one reduction."""
        del indexes
        return Gradient(self).apply((*self.get_retained_inputs(), grad_outputs[0]))  # type: ignore[no-any-return]

    def _local(self, xp: Any, x: Any) -> tuple[int, Any, Any, Any]:
        """Return the count, mean, deviations from the mean, and sums of their squares, of this rank's batch."""
        axis, expander = self.layout.axis, self.layout.expander
        count = int(np.prod([x.shape[i] for i in axis], dtype=np.int64))
        mean = statistics.total(x, axis, self.dtype) / max(count, 1)
        deviations = xp.subtract(x, mean[expander], dtype=self.dtype)
        if not self.counts:
            return 0, mean, deviations, xp.zeros_like(mean)
        return count, mean, deviations, self.layout.sum_of_products(xp, deviations, deviations)

    def _update_running(self, mean: _Array, var: _Array) -> None:
        if self.running_mean is None or not self.count:
            return
        unbiased = self.count / max(self.count - 1.0, 1.0)
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased * var)):
            running *= self.decay
            running += to_device_of(running, ((1 - self.decay) * value).astype(running.dtype))

    def _on_device(self, like: Any, values: _Array, shape: tuple[int, ...]) -> Any:
        return to_device_of(like, values.reshape(shape).astype(self.dtype))


class Gradient(chainer.FunctionNode):  # type: ignore[misc]  # Chainer has no types
    """The backward pass of batch normalisation, which cannot be differentiated itself.

    Args:
        function: The function whose backward it is.
    """

    def __init__(self, function: MultiNodeBatchNormalizationFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the gradients of input, gamma and beta; collective, one reduction."""
        x, gamma, gy = inputs
        forward = self.function
        xp = backend.get_array_module(x)
        layout, dtype, inv_std = forward.layout, forward.dtype, forward.inv_std
        deviations = xp.subtract(x, forward.mean[layout.expander], dtype=dtype)
        gy = gy.astype(dtype, copy=False) if forward.counts else xp.zeros_like(deviations)
        local_ggamma = layout.sum_of_products(xp, gy, deviations) * inv_std
        local_gbeta = statistics.total(gy, layout.axis, gy.dtype)
        packed = np.stack([to_host(local_ggamma), to_host(local_gbeta)]).astype(np.float64)
        ggamma, gbeta = to_device_of(x, forward.communicator.allreduce(packed))
        # gx = gamma / std (gy - (x_hat ggamma + gbeta) / count), in the memory of the deviations.
        scale = gamma * inv_std
        count = max(forward.count, 1.0)
        deviations *= (-scale * inv_std * ggamma / count).astype(dtype)[layout.expander]
        deviations -= (scale * gbeta / count).astype(dtype)[layout.expander]
        deviations += gy * scale.astype(dtype)[layout.expander]
        if not forward.counts:
            deviations[...] = 0
        ranks = forward.communicator.size
        return (
            deviations.astype(x.dtype, copy=False),
            (ggamma / ranks).astype(gamma.dtype),
            (gbeta / ranks).astype(gamma.dtype),
        )

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Refuse.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("MultiNodeBatchNormalization cannot be differentiated twice")
