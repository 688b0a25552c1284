"""Averaging of gradients in every step: after the backward pass, during it, or during the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import chainer

from mn_comm import CommunicatorBase, is_elastic, raise_on_all
from mn_comm.building_blocks import CompressionReport, GradientReducer, Owners, Reduction, waiting_for
from mn_optim.compression_state import serialize_compression
from mn_optim.join_state import Everyone, JoinState, LeftByException, NeedsParameters
from mn_optim.schemes.scheme import Backward, Scheme, TakeStep

logger = logging.getLogger(__name__)

__all__ = ["DoubleBuffered", "Overlapped", "Plain", "Synchronous"]


class Synchronous(Scheme):
    """The base class of schemes that average gradients in every step: all ranks' parameters are always equal.

    Args:
        communicator: The ranks that train together.
        zero_fill: Whether an initialised parameter without a gradient counts as one of zeros.
        reducer: Averages their gradients; ``None`` to let the communicator average.

    Attributes:
        loss_scale: The factor for the loss of a step's gradients; when the step is taken, the factor for its means.
    """

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool, reducer: GradientReducer | None) -> None:
        self.zero_fill = zero_fill
        self.loss_scale: float | None = None
        self._communicator = communicator
        self._reducer = reducer
        self._join: JoinState | None = None
        self._joined: GradientReducer | None = None

    @property
    def join(self) -> JoinState | None:
        """Within a join, which ranks have data; the reducer that is used sends it to the other ranks."""
        return self._join

    @join.setter
    def join(self, join: JoinState | None) -> None:
        self._join = join
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
        if self.average(model, backward) and _rescale(model, self.factor):
            take_step()

    def average(self, model: chainer.Link, backward: Backward | None) -> bool:
        """Compute gradients and average them; collective.

        Args:
            model: The model.
            backward: Computes its gradients; ``None`` if they are there.

        Returns:
            Whether the gradients are now averages, so that a step can be taken.
        """
        raise NotImplementedError

    def exchange_messages(self, model: chainer.Link, until_quiet: bool = False) -> None:
        """Inform the other ranks of a join at their next averaging; collective."""
        assert self.join is not None
        with self.join.together(), waiting_for(lambda: "the ranks of a join()"):
            self.reducer_of(model).exchange_messages(until_quiet)

    def reducer_of(self, model: chainer.Link) -> GradientReducer:
        """Return the reducer of a model's gradients, which also transfers the messages of a join."""
        reducer = self._communicator.mean_grad_reducer(model) if self._reducer is None else self._reducer
        self._joined, reducer.join = reducer, self._join
        return reducer

    def leave_to(self, model: chainer.Link, owners: Owners | None) -> bool:
        """Leave the means of the next step only on the ranks that need them, if possible.

        Args:
            model: The model.
            owners: Which rank needs which mean; ``None`` if all ranks need all means.

        Returns:
            Whether the means will be only there.
        """
        return False

    def agree_on(self, operation: str, model: chainer.Link, compares: bool = False) -> None:
        """Raise on every rank unless all ranks are about to do the same; collective."""
        try:
            reducer = self.reducer_of(model)
        except NotImplementedError:  # the script's own class of communicator
            return
        reducer.agree_on(operation, model if compares else None)

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Save or load the part that compression has not sent yet; nothing else outlives a step."""
        if self._reducer is not None:
            serialize_compression(serializer, self._reducer)


class Plain(Synchronous):
    """Average after the backward pass."""

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool, reducer: GradientReducer | None) -> None:
        super().__init__(communicator, zero_fill, reducer)
        self._average = communicator.multi_node_mean_grad if reducer is None else reducer.average
        self._owners: Owners | None = None

    def average(self, model: chainer.Link, backward: Backward | None) -> bool:
        """Compute gradients, then average them; collective."""
        if backward is not None:
            backward(None)
        if self.join is not None:
            with self.join.together(), waiting_for(lambda: "gradients, within join()"):
                self.reducer_of(model).average(model, self.zero_fill, self._owners)
        elif self._owners is not None:
            with waiting_for(lambda: "gradients, each for its owner"):
                self.reducer_of(model).average(model, self.zero_fill, self._owners)
        else:
            self._average(model, self.zero_fill)
        return True

    def leave_to(self, model: chainer.Link, owners: Owners | None) -> bool:
        """Leave the means of the next step only on the ranks that need them, if the communicator supports it."""
        self._owners = owners if owners is not None and _can_leave(self, model) else None
        return self._owners is not None


class Overlapped(Synchronous):
    """Average each bucket of gradients as soon as it is final, during the backward pass.

    On every rank, buckets are sent in the order in which rank 0's gradients became final in the first step.

    Args:
        communicator: The ranks that train together.
        reducer: Averages their gradients in the background.
    """

    def __init__(self, communicator: CommunicatorBase, reducer: GradientReducer) -> None:
        super().__init__(communicator, True, reducer)
        self._order: list[str] | None = None
        self._owners: Owners | None = None

    def leave_to(self, model: chainer.Link, owners: Owners | None) -> bool:
        """Leave the means of the next step only on the ranks that need them, unless a hook returns all means."""
        self._owners = owners if _can_leave(self, model) else None
        return self._owners is not None

    def average(self, model: chainer.Link, backward: Backward | None) -> bool:
        """Compute gradients and average them at the same time; collective."""
        if self._order is None and (backward is not None or self.join is not None):
            self._order = self._learn_order(model, backward)
            backward = None
        if self.join is None:
            self._reduce(model, backward)
        else:
            with self.join.together():
                self._reduce(model, backward)
        return True

    def _reduce(self, model: chainer.Link, backward: Backward | None) -> None:
        order = self._order or ()
        reduction = self.reducer_of(model).start(model, zero_fill=True, order=order, owners=self._owners)
        try:
            if backward is not None:
                _run(backward, model, reduction.ready)
            reduction.ready_all()
        except BaseException:
            reduction.abandon()
            raise
        reduction.wait()

    def restart(self, model: chainer.Link) -> None:
        """Learn the order again in the next step."""
        self._order = None

    def _learn_order(self, model: chainer.Link, backward: Backward | None) -> list[str]:
        if self.join is not None:
            self.exchange_messages(model, until_quiet=True)  # all ranks come here, or none
            self.join.is_together = True
        else:
            self.agree_on("the first backward pass of an overlap", model)
        names: list[str] = []
        with raise_on_all(self._communicator):
            if backward is not None:
                _run(backward, model, names.append)
        # Functions of equal rank may have a different order in another run.
        names = self.reducer_of(model).remembered_order(model) or names
        if self.join is not None:  # rank 0 may have no data
            return next((each for each in self._communicator.allgather_obj(names) if each), [])
        order: list[str] = self._communicator.bcast_obj(names if self._communicator.rank == 0 else None)
        return order


class DoubleBuffered(Synchronous):
    """Average during the next forward and backward pass: each step applies the gradients of the previous one.

    Args:
        communicator: The ranks that train together.
        reducer: Averages gradients in the background.
        zero_fill: Whether an initialised parameter without a gradient counts as one of zeros.
    """

    def __init__(self, communicator: CommunicatorBase, reducer: GradientReducer, zero_fill: bool) -> None:
        super().__init__(communicator, zero_fill, reducer)
        self._under_way: Reduction | None = None
        self._has_begun = False
        self._factors = (1.0, 1.0)
        self._loss_scale: float | None = None

    @property
    def factor(self) -> float:
        """The factor for the means of the previous step."""
        return self._factors[0]

    def average(self, model: chainer.Link, backward: Backward | None) -> bool:
        """Compute gradients, start to average them, and wait for those of the previous step; collective."""
        if backward is not None:
            backward(None)
        if self.join is None:
            return self._exchange(model)
        with self.join.together():
            has_means = self._exchange(model)
        return has_means

    def _exchange(self, model: chainer.Link) -> bool:
        previous, self._under_way = self._under_way, None
        try:
            current = self._start(model, previous)
        except (Everyone, NeedsParameters, LeftByException):  # a rank that has left still has its own
            self._under_way = previous
            raise
        except BaseException:
            if previous is not None:
                previous.drain()
            raise
        self._under_way, self._has_begun = current, True
        self._factors = (self._factors[1], 1.0 if self.join is None else self.join.factor)
        before, self._loss_scale = self._loss_scale, self.loss_scale
        self.loss_scale = 1.0 if before is None and self.loss_scale is not None else before
        if previous is None:
            return False
        previous.wait()
        return True

    def _start(self, model: chainer.Link, previous: Reduction | None) -> Reduction:
        """Start to average gradients; an exception on one rank is raised on all, so that no rank takes a step.

        Args:
            model: The model.
            previous: The reduction whose means are applied next, if any.
        """
        current = self.reducer_of(model).start(model, self.zero_fill)
        try:
            current.agree()  # first, because the other ranks receive an announcement only here
            with raise_on_all(self._communicator):
                if previous is not None:
                    previous.expect_shapes()
                current.ready_all()
        except BaseException:
            current.drain()
            raise
        return current

    def restart(self, model: chainer.Link) -> None:
        """Wait for pending averages, and discard them; collective."""
        if self._under_way is not None:
            self._under_way.drain()
            self._under_way = None
        if self._has_begun and is_elastic(self._communicator) and self._communicator.rank == 0:
            logger.warning("double buffering: the gradients of the step before were under way, and are dropped")
        self._has_begun = False


def _can_leave(scheme: Synchronous, model: chainer.Link) -> bool:
    """Return whether means can be left to the ranks that need them."""
    try:
        return scheme.reducer_of(model).can_leave_to_owners
    except NotImplementedError:  # the script's own class of communicator
        return False


def _rescale(model: chainer.Link, factor: float) -> bool:
    """Multiply gradients; return whether there are any to take a step with."""
    if factor not in (0.0, 1.0):
        for param in {id(param): param for param in model.params()}.values():
            if param.data is not None and param.grad is not None:
                param.grad *= factor
    return factor > 0


def _run(backward: Backward, model: chainer.Link, on_final: Callable[[str], None]) -> None:
    """Compute gradients, and report the names of the model's parameters as their gradients become final."""
    name_of = {id(param): name for name, param in model.namedparams() if param.data is not None}

    def tell(variable: chainer.Variable) -> None:
        name = name_of.get(id(variable))
        if name is not None:
            on_final(name)

    backward(tell)
