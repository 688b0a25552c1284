"""The multi-node optimizer: backward, then average, then the actual optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer

from mn_comm import CommunicatorBase, Model

__all__ = ["MultiNodeOptimizer", "create_multi_node_optimizer"]


def create_multi_node_optimizer(
    actual_optimizer: chainer.Optimizer,
    communicator: CommunicatorBase,
    double_buffering: bool = False,
    zero_fill: bool = True,
) -> MultiNodeOptimizer:
    """Make an optimizer average its gradients over all ranks before each step.

    Args:
        actual_optimizer: A Chainer optimizer, set up already or not.
        communicator: The ranks that train replicas of the same model.
        double_buffering: Whether each step applies the gradients of the one before, while its own travel.
        zero_fill: Whether an initialised parameter that got no gradient counts as one of zeros; otherwise it is left
            out of the average, and must be left out on every rank alike.

    Returns:
        The multi-node optimizer. Everything but ``update`` and ``setup`` is read from and written to
        ``actual_optimizer``.

    Raises:
        TypeError: ``actual_optimizer`` is not a Chainer optimizer.
        NotImplementedError: ``double_buffering`` is asked for.
    """
    if not isinstance(actual_optimizer, chainer.Optimizer):
        raise TypeError(
            f"expected a chainer.Optimizer for actual_optimizer, got {type(actual_optimizer).__name__}: "
            f"{actual_optimizer!r:.80}"
        )
    if double_buffering:
        raise NotImplementedError("double_buffering is still to be built")
    return MultiNodeOptimizer(actual_optimizer, communicator, zero_fill)


class MultiNodeOptimizer:
    """A Chainer optimizer whose gradients are averaged over all ranks; see :func:`create_multi_node_optimizer`."""

    __slots__ = ("_seen", "actual_optimizer", "communicator", "zero_fill")

    actual_optimizer: chainer.Optimizer
    communicator: CommunicatorBase
    zero_fill: bool

    def __init__(self, actual_optimizer: chainer.Optimizer, communicator: CommunicatorBase, zero_fill: bool) -> None:
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self.zero_fill = zero_fill
        self._seen: list[tuple[str, bool]] | None = None

    def setup(self, link: chainer.Link) -> MultiNodeOptimizer:
        """Set the model whose parameters are to be optimised, and return this optimizer."""
        self.actual_optimizer.setup(link)
        return self

    def update(self, lossfun: Callable[..., chainer.Variable] | None = None, *args: Any, **kwds: Any) -> None:
        """Average the gradients over all ranks and take a step; collective.

        The first time, and whenever the names of the parameters change or which of them are initialised, the parameters
        of rank 0 are given to all ranks instead, and no step is taken.

        Args:
            lossfun: Computes the loss, whose gradients are then computed; ``None`` if the gradients are there already.
            args: Passed to ``lossfun``.
            kwds: Passed to ``lossfun``.

        Raises:
            RuntimeError: No model was set up.
            ValueError: The ranks' models or gradients differ in names, shapes or dtypes (on every rank).
        """
        model = self.actual_optimizer.target
        if model is None:
            raise RuntimeError("expected a model before the first update: call setup(model)")
        if lossfun is not None:
            self._backward(model, lossfun(*args, **kwds))
        if self._is_changed(model):
            self.communicator.bcast_data(model)
        else:
            self.communicator.multi_node_mean_grad(model, self.zero_fill)
            self.actual_optimizer.update(None)

    def _backward(self, model: chainer.Link, loss: chainer.Variable) -> None:
        if getattr(self.actual_optimizer, "_use_cleargrads", True):
            model.cleargrads()
        else:
            model.zerograds()
        # Chainer keeps the loss scale that loss_scaling() and set_loss_scale() set in a private attribute only.
        loss.backward(loss_scale=self.actual_optimizer._loss_scale)  # noqa: SLF001

    def _is_changed(self, model: Model) -> bool:
        seen = [(name, param.data is not None) for name, param in sorted(model.namedparams())]
        changed = seen != self._seen
        self._seen = seen
        return changed

    def __getattr__(self, name: str) -> Any:
        if name in MultiNodeOptimizer.__slots__:  # not set yet: while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in MultiNodeOptimizer.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.actual_optimizer, name, value)
