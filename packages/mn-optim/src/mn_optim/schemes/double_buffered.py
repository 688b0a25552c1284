"""Double buffering: the scheme that averages gradients during the next forward and backward pass."""

from __future__ import annotations

import logging
from typing import Any

import chainer

from mn_comm import CommunicatorBase, is_elastic, raise_on_all
from mn_comm.building_blocks import GradientReducer, Reduction
from mn_optim.join_state import Everyone, LeftByException, NeedsParameters
from mn_optim.schemes.scheme import Backward, Synchronous

logger = logging.getLogger(__name__)


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

    def can_leave_to_owners(self, model: chainer.Link) -> bool:
        """Return that all ranks get all means: before they are used, hooks may have come that need them."""
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

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Save or load the part that compression has not sent yet; loading discards a pending average."""
        if not isinstance(serializer, chainer.Serializer):
            self.restart(model)
        super().serialize(serializer, model)
