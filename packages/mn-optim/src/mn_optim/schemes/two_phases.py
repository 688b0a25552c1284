"""A scheme that uses one scheme for the first steps, and then another one."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np

from mn_comm import CommunicatorBase
from mn_comm.building_blocks import CompressionReport
from mn_optim.join_state import JoinState
from mn_optim.schemes.scheme import Backward, Scheme, Synchronous, TakeStep
from mn_optim.serialized import read
from mn_optim.sharding.shards import Shards


class TwoPhases(Scheme):
    """Averages gradients in each of the first steps, and then continues with another scheme.

    Args:
        communicator: The ranks that train together.
        steps: How many steps the first phase has.
        first: The scheme for these steps.
        then: The scheme for all later steps.
    """

    def __init__(self, communicator: CommunicatorBase, steps: int, first: Synchronous, then: Scheme) -> None:
        super().__init__(communicator)
        self.zero_fill = first.zero_fill and then.zero_fill
        self.is_meeting = False
        self.may_diverge = then.may_diverge
        self._steps = steps
        self._first = first
        self._then = then

    def use_join(self, join: JoinState | None) -> None:
        """Begin a join, or end it with ``None``."""
        super().use_join(join)
        self._first.use_join(join)
        self._then.use_join(join)

    @property
    def current(self) -> Scheme:
        """The scheme of the next step."""
        return self._first if self.n_steps < self._steps else self._then

    @property
    def shards(self) -> Shards | None:  # type: ignore[override]  # it changes with the phase
        """This rank's part of the state, if the state is sharded in this phase."""
        return self.current.shards

    @property
    def has_diverged(self) -> bool:
        """Whether ranks may hold different parameters now."""
        return self._then.has_diverged

    @property
    def synchronous(self) -> Synchronous | None:
        """The scheme that averages gradients in the next step, if that is a synchronous one."""
        return self.current.synchronous

    @property
    def compression_report(self) -> CompressionReport | None:
        """The report of the first scheme in its phase, if it compresses; otherwise that of the other one."""
        return self.current.compression_report or self._then.compression_report

    def step(self, model: chainer.Link, backward: Backward | None, take_step: TakeStep) -> None:
        """Take a step with the current scheme."""
        scheme = self.current
        scheme.step(model, backward, take_step)
        self.is_meeting = scheme.is_meeting
        self.share_of_meeting = scheme.share_of_meeting

    def idle(self, model: chainer.Link) -> None:
        """Take part in local steps of the other ranks, without data."""
        self._then.idle(model)
        self.is_meeting = self._then.is_meeting

    def fail(self, model: chainer.Link, error: Exception) -> None:
        """Inform the other ranks that this one has left a join because of an exception."""
        self.current.fail(model, error)

    def restart(self, model: chainer.Link) -> None:
        """Discard pending averages; collective."""
        if self.current is self._first:
            self._then.check(model)
        self.current.restart(model)

    def synchronize(self, model: chainer.Link) -> bool:
        """Make all ranks' parameters equal; collective."""
        return self.current.synchronize(model)

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Save or load how many steps were taken, and the state of both schemes; not collective."""
        mine = serializer["multi_node_synchronous_first"]
        if isinstance(serializer, chainer.Serializer):
            mine("taken", np.array([min(self.n_steps, self._steps)]))
        else:
            taken = read(mine, "taken")
            self.n_steps = 0 if taken is None else int(taken[0])
        self._first.serialize(mine, model)
        self._then.serialize(serializer, model)
