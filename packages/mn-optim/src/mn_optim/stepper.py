"""The steps of a multi-node optimizer: what a scheme needs from the actual optimizer, and what surrounds a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import chainer

from mn_comm import CommunicatorBase, span
from mn_comm.building_blocks import Model, register_synchronizer
from mn_optim.backward import backward as overlapping_backward
from mn_optim.schemes.scheme import Backward, Scheme

__all__ = ["Defer", "Stepper"]

Defer = Callable[[Callable[[], None]], None]
"""Records what is to be done once all ranks have agreed."""


class Stepper:
    """Takes the steps of an optimizer by a scheme, and distributes the parameters of rank 0 before the first.

    Args:
        actual_optimizer: The optimizer.
        communicator: The ranks.
        scheme: When gradients are averaged.

    Attributes:
        actual_optimizer: The optimizer.
        communicator: The ranks.
        scheme: When gradients are averaged.
        target_params: The names of the parameters, and whether each was initialised, as last seen.
        shared: The parameters that all ranks have in common, by name.
        has_part: Whether gradients of a part of a mini-batch have been added up.
    """

    def __init__(self, actual_optimizer: Any, communicator: CommunicatorBase, scheme: Scheme) -> None:
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self.scheme = scheme
        self.target_params: list[tuple[str, bool]] = []
        self.shared: dict[str, Any] = {}
        self.has_part = False

    def model(self, what: str) -> chainer.Link:
        """Return the model.

        Raises:
            RuntimeError: There is none, which ``what`` needs.
        """
        model = self.actual_optimizer.target
        if model is None:
            raise RuntimeError(f"expected a model before {what}: call setup(model)")
        return model

    def is_changed(self, model: Model) -> bool:
        """Return whether the names of a model's parameters, or which are initialised, differ from the last call.

        Or whether other parameters are optimised now than those that the ranks share, under the same names: schemes
        keep gradients, and copies, of those that they know.
        """
        previous, named = self.target_params, sorted(model.namedparams())
        self.target_params = [(name, param.data is not None) for name, param in named]
        return self.target_params != previous or self._has_others(named)

    def _has_others(self, named: Iterable[tuple[str, Any]]) -> bool:
        others = [param for name, param in named if self.shared.get(name, param) is not param]
        # A link may create parameters in every forward pass; without a rule, they are not optimised.
        return any(getattr(param, "update_rule", None) is not None for param in others)

    def _share(self, model: chainer.Link) -> None:
        """Remember that all ranks have the parameters of a model in common."""
        self.shared = dict(model.namedparams())
        self.is_changed(model)

    def assume_synchronized(self) -> None:
        """Assume that the parameters of all ranks are equal already."""
        model = self.model("assume_synchronized")
        register_synchronizer(self, (param for _, param in model.namedparams()))
        self._share(model)

    def synchronize(self) -> None:
        """Make the parameters of all ranks equal; collective."""
        model = self.model("synchronize")
        if self.scheme.may_diverge and (not self.target_params or self._has_others(model.namedparams())):
            self.share_out(model)
        if self.scheme.synchronize(model):
            self.assume_synchronized()

    def share_out(self, model: chainer.Link) -> None:
        """Distribute the parameters of rank 0 to all ranks; collective."""
        self.target_params = []
        if self.scheme.synchronous is not None and self.scheme.join is None:
            self.scheme.synchronous.agree_on("bcast_data", model, compares=True)
        register_synchronizer(self, (param for _, param in model.namedparams()))
        self.scheme.share_out(model)
        self._share(model)

    def step(
        self, model: chainer.Link, backward: Backward | None, step: Callable[[], None], defer: Defer | None = None
    ) -> None:
        """Take a step by the scheme; collective, depending on the scheme.

        Args:
            model: The model.
            backward: Computes its gradients; ``None`` if they are there.
            step: Lets the actual optimizer take the step.
            defer: Records the step, to be taken later; ``None`` to take it now.
        """
        join, synchronous = self.scheme.join, self.scheme.synchronous
        has_loss = backward is not None or (join is not None and join.message.is_absent)
        loss_scale = self._loss_scale if has_loss else None
        if synchronous is not None:
            synchronous.use_loss_scale(loss_scale, has_loss)

        def take_step() -> None:
            self.scheme.count_step()
            scale = loss_scale if synchronous is None else synchronous.loss_scale
            if scale is not None:
                # A mean is scaled even if this rank's backward pass gave no gradient.
                for param in model.params():
                    param._loss_scale = scale  # noqa: SLF001 - Chainer has no public name for it
            with span("update"):
                step()

        self.scheme.step(model, backward, take_step if defer is None else partial(defer, take_step))

    def backward_from(self, model: chainer.Link, loss: chainer.Variable) -> Backward:
        """Clear the gradients, unless they are added up, and return the backward pass that starts from ``loss``."""
        if not self.has_part:
            if getattr(self.actual_optimizer, "_use_cleargrads", True):
                model.cleargrads()
            else:
                model.zerograds()
        loss_scale = self._loss_scale
        held = [loss]

        def backward(on_final: Callable[[chainer.Variable], None] | None) -> None:
            taken = held.pop()  # so that the graph is freed before the gradients are averaged
            with span("backward"):
                if on_final is None:
                    taken.backward(loss_scale=loss_scale)
                else:
                    overlapping_backward(taken, loss_scale, on_final)

        return backward

    @property
    def _loss_scale(self) -> float | None:
        # Chainer keeps the loss scale of loss_scaling() and set_loss_scale() only in a private attribute.
        return getattr(self.actual_optimizer, "_loss_scale", None)
