"""Averaging of gradients in every step: after the backward pass, during it, or during the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable

import chainer

from mn_comm import CommunicatorBase, is_elastic, raise_on_all
from mn_comm.building_blocks import GradientReducer, Owners, Reduction, waiting_for
from mn_optim.join_state import Everyone, LeftByException, NeedsParameters
from mn_optim.schemes.scheme import Backward, Synchronous

logger = logging.getLogger(__name__)

__all__ = ["DoubleBuffered", "Overlapped", "Plain"]


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


class Overlapped(Synchronous):
    """Average each bucket of gradients as soon as it is final, during the backward pass.

    On every rank, buckets are sent in the order in which rank 0's gradients became final in the first step.

    Args:
        communicator: The ranks that train together.
        reducer: Averages their gradients in the background.
    """

    _order: list[str] | None = None

    def average(self, model: chainer.Link, backward: Backward | None) -> bool:
        """Compute gradients and average them at the same time; collective."""
        if self._order is None and (backward is not None or self.join is not None):
            self._order = self._learn_order(model, backward)
            backward = None
        with self.together():
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
        super().__init__(communicator, reducer, zero_fill)
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
        with self.together():
            return self._exchange(model)

    def leave_to(self, model: chainer.Link, owners: Owners | None) -> bool:
        """Leave all means on all ranks: before they are used, hooks may have come that need them."""
        return False

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


def _run(backward: Backward, model: chainer.Link, on_final: Callable[[str], None]) -> None:
    """Compute gradients, and report the names of the model's parameters as their gradients become final."""
    name_of = {id(param): name for name, param in model.namedparams() if param.data is not None}

    def tell(variable: chainer.Variable) -> None:
        name = name_of.get(id(variable))
        if name is not None:
            on_final(name)

    backward(tell)
