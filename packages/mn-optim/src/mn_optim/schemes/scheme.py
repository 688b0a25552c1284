"""The way of a step from the optimizer to the communicator: the stepper, what a scheme is, and the plain scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import chainer

from mn_comm import Change, CommunicatorBase, span
from mn_comm.building_blocks import CompressionReport, GradientReducer, Owners, register_synchronizer, waiting_for
from mn_optim.backward import backward as overlapping_backward
from mn_optim.join_state import JoinState
from mn_optim.schemes.parameters import share_out
from mn_optim.serialized import serialize_compression
from mn_optim.sharding.shards import Shards

Backward = Callable[[Callable[[chainer.Variable], None] | None], None]
"""Computes the gradients; calls its argument with each gradient as it becomes final."""
TakeStep = Callable[[], None]
"""Makes the actual optimizer take a step with the current gradients of the model."""
Defer = Callable[[Callable[[], None]], None]
"""Records what is to be done once all ranks have agreed."""
NO_REPLACEMENT = "ranks whose parameters differ, or that have parts of a state, cannot stand in for one that is lost"
"""Why an elastic communicator is refused."""


class Stepper:
    """Takes the steps of an optimizer by a scheme, and distributes the parameters of rank 0 before the first.

    Args:
        actual_optimizer: The optimizer.
        communicator: The ranks.
        scheme: When gradients are averaged.

    Attributes:
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

    def is_changed(self, model: chainer.Link) -> bool:
        """Return what :meth:`needs_sharing` does, and from now on count this model as seen."""
        is_changed = self.needs_sharing(model)
        self.target_params = _outline(model.namedparams())
        return is_changed

    def needs_sharing(self, model: chainer.Link) -> bool:
        """Return whether the names of a model's parameters, or which are initialised, differ from those last seen.

        Or whether other parameters are optimised now than those that the ranks share, under the same names: schemes
        keep gradients, and copies, of those that they know.
        """
        named = list(model.namedparams())
        return _outline(named) != self.target_params or self._has_others(named)

    def _has_others(self, named: Iterable[tuple[str, Any]]) -> bool:
        others = [param for name, param in named if self.shared.get(name, param) is not param]
        # A link may create parameters in every forward pass; without a rule, they are not optimised.
        return any(getattr(param, "update_rule", None) is not None for param in others)

    def _share(self, model: chainer.Link) -> None:
        """Remember that all ranks have the parameters of a model in common."""
        self.shared = dict(model.namedparams())
        self.target_params = _outline(model.namedparams())

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
        """Discard pending averages, and distribute the parameters of rank 0 to all ranks; collective."""
        self.target_params = []
        if self.scheme.synchronous is not None and self.scheme.join is None:
            self.scheme.synchronous.agree_on("bcast_data", model, compares=True)
        register_synchronizer(self, (param for _, param in model.namedparams()))
        self.scheme.restart(model)
        if self.scheme.shards is not None:
            self.scheme.shards.restart()
        share_out(self.communicator, model, fills_in=self.scheme.join is not None)
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
            self.scheme.n_steps += 1  # before: where the step fails, it has failed between two meetings
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


def _outline(named: Iterable[tuple[str, Any]]) -> list[tuple[str, bool]]:
    return sorted((name, param.data is not None) for name, param in named)


class Scheme:
    """Determines what is averaged over the ranks, and when. By default, nothing is pending between two steps.

    Args:
        communicator: The ranks that train together.

    Attributes:
        zero_fill: Whether an initialised parameter without a gradient counts as one of zeros.
        is_meeting: Whether ranks exchanged something in the latest step.
        share_of_meeting: The share of the model that ranks exchange when they do.
        n_steps: How many steps the optimizer has taken, or begun to take.
        may_diverge: Whether ranks may hold different parameters between two steps.
        join: Within a join, which ranks have data; otherwise ``None``.
        shards: This rank's part of the actual optimizer's state, if the state is sharded.
    """

    zero_fill: bool = True
    is_meeting: bool = True
    share_of_meeting: float = 1.0
    n_steps: int = 0
    may_diverge: bool = False
    join: JoinState | None = None
    shards: Shards | None = None

    def __init__(self, communicator: CommunicatorBase) -> None:
        self._communicator = communicator

    def use_join(self, join: JoinState | None) -> None:
        """Begin a join, or end it with ``None``."""
        self.join = join

    @property
    def has_diverged(self) -> bool:
        """Whether ranks may hold different parameters now."""
        return False

    @property
    def synchronous(self) -> Synchronous | None:
        """The scheme that averages gradients in the next step; ``None`` if that is a local step."""
        return None

    @property
    def compression_report(self) -> CompressionReport | None:
        """The report of compression for the latest step; ``None`` without compression."""
        return None

    def step(self, model: chainer.Link, backward: Backward | None, take_step: TakeStep) -> None:
        """Compute gradients, and take a step; average before, during or after it.

        Args:
            model: The model.
            backward: Computes its gradients; ``None`` if they are there.
            take_step: Takes the step; need not be called.
        """
        raise NotImplementedError

    def idle(self, model: chainer.Link) -> None:
        """Take part in local steps of the other ranks, without data."""

    def fail(self, model: chainer.Link, error: Exception) -> None:
        """Inform the other ranks that this one has left a join because of an exception, if steps are local."""

    def check(self, model: chainer.Link) -> None:
        """Raise on every rank if the scheme cannot train a model; collective."""

    def restart(self, model: chainer.Link) -> None:
        """Discard pending averages, before the parameters of rank 0 are distributed; collective."""

    def restart_after_loss(self, change: Change) -> None:
        """Discard pending averages, because a rank was lost, in a step or between two steps."""
        self.restart(None)

    def synchronize(self, model: chainer.Link) -> bool:
        """Make all ranks' parameters equal, once those of rank 0 have been distributed; collective.

        Return whether they were distributed again in the meantime.
        """
        return False

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Save or load the scheme's state, which may be missing where it is loaded; not collective."""


class Synchronous(Scheme):
    """The base class of schemes that average gradients in every step: all ranks' parameters are always equal.

    Args:
        communicator: The ranks that train together.
        reducer: Averages their gradients; ``None`` to let the communicator average.
        zero_fill: Whether an initialised parameter without a gradient counts as one of zeros.

    Attributes:
        loss_scale: The factor for the loss of a step's gradients; when the step is taken, the factor for its means.
    """

    def __init__(self, communicator: CommunicatorBase, reducer: GradientReducer | None, zero_fill: bool = True) -> None:
        super().__init__(communicator)
        self.zero_fill = zero_fill
        self.loss_scale: float | None = None
        self._reducer = reducer
        self._joined: GradientReducer | None = None
        self._owners: Owners | None = None

    def use_join(self, join: JoinState | None) -> None:
        """Begin a join, or end it with ``None``; the reducer that is used sends its messages to the other ranks."""
        self.join = join
        if self._joined is not None:
            self._joined.join = join

    @property
    def synchronous(self) -> Synchronous:
        """This scheme: every step is synchronous."""
        return self

    @property
    def compression_report(self) -> CompressionReport | None:
        """The report of the reducer."""
        return None if self._reducer is None else self._reducer.compression_report

    @property
    def factor(self) -> float:
        """The factor for the current means; 0 if no rank had data."""
        return 1.0 if self.join is None else self.join.factor

    def use_loss_scale(self, loss_scale: float | None, has_loss: bool) -> None:
        """Set the factor for the loss of the next step's gradients, if there is a loss."""
        self.loss_scale = loss_scale
        if self._reducer is not None and has_loss:
            # The part that compression has not sent yet is in the units of the gradients.
            self._reducer.scale_errors(loss_scale or 1.0)

    def step(self, model: chainer.Link, backward: Backward | None, take_step: TakeStep) -> None:
        """Compute gradients and average them, then take a step if there are means; collective."""
        if self.shards is not None:
            take_step = self._divided(self.shards, model, take_step)
        if self.average(model, backward) and _rescale(model, self.factor):
            take_step()

    def _divided(self, shards: Shards, model: chainer.Link, take_step: TakeStep) -> TakeStep:
        """Return what updates this rank's parameters, and sends them to all ranks; collective.

        ZeRO-1: Rajbhandari et al. 2019, arXiv 1910.02054, section 5.1.
        """
        shards.forget_gathered()
        if not shards.is_settled and self.join is None:
            self.agree_on("the choice of which rank keeps which state", model)
        owners = shards.owners(model, may_choose=self.join is None)
        self._owners = owners if owners is not None and self.can_leave_to_owners(model) else None
        return partial(shards.take_step, model, take_step, has_all_means=self._owners is None)

    def average(self, model: chainer.Link, backward: Backward | None) -> bool:
        """Compute gradients and average them; collective. Return whether a step can be taken with them."""
        raise NotImplementedError

    def exchange_messages(self, model: chainer.Link, until_quiet: bool = False) -> None:
        """Inform the other ranks of a join at their next averaging; collective.

        Args:
            model: The model.
            until_quiet: Whether all ranks call this instead of averaging, and continue only when none has a new
                message.
        """
        assert self.join is not None
        with self.join.together(), waiting_for(lambda: "the ranks of a join()"):
            self.reducer_of(model).exchange_messages(until_quiet)

    def together(self) -> AbstractContextManager[None]:
        """Return a context for something that all ranks do together; see :meth:`JoinState.together`."""
        return nullcontext() if self.join is None else self.join.together()

    def reducer_of(self, model: chainer.Link) -> GradientReducer:
        """Return the reducer of a model's gradients, which also transfers the messages of a join."""
        reducer = self._communicator.mean_grad_reducer(model) if self._reducer is None else self._reducer
        self._joined, reducer.join = reducer, self.join
        return reducer

    def can_leave_to_owners(self, model: chainer.Link) -> bool:
        """Return whether the means of the next step can be left only on the ranks that need them."""
        with suppress(NotImplementedError):  # the script's own class of communicator
            return self.reducer_of(model).can_leave_to_owners
        return False

    def agree_on(self, operation: str, model: chainer.Link, compares: bool = False) -> None:
        """Raise on every rank unless all ranks are about to do the same; collective.

        If a parameter was added on one rank only, the others average the gradients of the parameters that they had
        before, maybe in the background, where nothing else meets them.

        Args:
            operation: What comes next, for messages.
            model: The model.
            compares: Whether its parameters must be the same on all ranks in names, shapes and dtypes.

        Raises:
            ValueError: The ranks differ.
        """
        try:
            reducer = self.reducer_of(model)
        except NotImplementedError:  # the script's own class of communicator
            return
        reducer.agree_on(operation, model if compares else None)

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Save or load the part that compression has not sent yet; nothing else outlives a step."""
        if self._reducer is not None:
            serialize_compression(serializer, self._reducer)


def _rescale(model: chainer.Link, factor: float) -> bool:
    """Multiply gradients; return whether there are any to take a step with."""
    if factor not in (0.0, 1.0):
        for param in {id(param): param for param in model.params()}.values():
            if param.data is not None and param.grad is not None:
                param.grad *= factor
    return factor > 0


class Plain(Synchronous):
    """Average after the backward pass."""

    def average(self, model: chainer.Link, backward: Backward | None) -> bool:
        """Compute gradients, then average them; collective."""
        if backward is not None:
            backward(None)
        if self._reducer is None and self.join is None and self._owners is None:
            self._communicator.multi_node_mean_grad(model, self.zero_fill)
        else:
            with self.together(), waiting_for(self._describe):
                self.reducer_of(model).average(model, self.zero_fill, self._owners)
        return True

    def _describe(self) -> str:
        if self.join is not None:
            return "gradients, within join()"
        return "gradients" if self._owners is None else "gradients, each for its owner"
