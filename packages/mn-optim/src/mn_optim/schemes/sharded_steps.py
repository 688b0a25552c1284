"""A scheme around a synchronous one: each rank updates only the parameters that it owns, and has only their state."""

from __future__ import annotations

from functools import partial
from typing import Any

import chainer

from mn_comm import CommunicatorBase
from mn_comm.building_blocks import CompressionReport
from mn_optim.join_state import JoinState
from mn_optim.schemes.scheme import Backward, Scheme, Synchronous, TakeStep
from mn_optim.sharding.shards import Shards

__all__ = ["ShardedSteps"]


class ShardedSteps(Scheme):
    """Averages like another scheme; the step that follows is divided among the ranks.

    ZeRO-1: Rajbhandari et al. 2019, arXiv 1910.02054, section 5.1.

    Args:
        communicator: The ranks that train together.
        inside: Averages gradients.
        shards: The part that this rank owns.
    """

    def __init__(self, communicator: CommunicatorBase, inside: Synchronous, shards: Shards) -> None:
        super().__init__(communicator)
        self.zero_fill = inside.zero_fill
        self._inside = inside
        self.shards: Shards = shards

    def use_join(self, join: JoinState | None) -> None:
        """Begin a join, or end it with ``None``."""
        super().use_join(join)
        self._inside.use_join(join)

    @property
    def synchronous(self) -> Synchronous:
        """The scheme that averages gradients."""
        return self._inside

    @property
    def compression_report(self) -> CompressionReport | None:
        """The report of the scheme that averages gradients."""
        return self._inside.compression_report

    def step(self, model: chainer.Link, backward: Backward | None, take_step: TakeStep) -> None:
        """Average gradients, update this rank's parameters, and send them to all ranks; collective."""
        self.shards.forget_gathered()
        if not self.shards.is_settled and self.join is None:
            self._inside.agree_on("the choice of which rank keeps which state", model)
        owners = self.shards.owners(model, may_choose=self.join is None)
        has_all_means = not self._inside.leave_to(model, owners)
        self._inside.step(model, backward, partial(self.shards.take_step, model, take_step, has_all_means))

    def restart(self, model: chainer.Link) -> None:
        """Discard pending averages, and determine the owners again; collective."""
        self._inside.restart(model)
        self.shards.restart()

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Save or load the state of the scheme that averages gradients; not collective."""
        self._inside.serialize(serializer, model)
