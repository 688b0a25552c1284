"""A scheme around another one: each rank updates only the parameters that it owns, and has only their state."""

from __future__ import annotations

from functools import partial
from typing import Any

import chainer

from mn_optim.schemes.scheme import Backward, TakeStep
from mn_optim.schemes.scheme_wrapper import SchemeWrapper
from mn_optim.schemes.synchronous import Synchronous
from mn_optim.sharding import Shards

__all__ = ["Sharded"]


class Sharded(SchemeWrapper):
    """Averages like another scheme; the step that follows is divided among the ranks.

    ZeRO-1: Rajbhandari et al. 2019, arXiv 1910.02054, section 5.1.

    Args:
        exact: Averages gradients.
        shards: The part that this rank owns.
    """

    is_meeting = True
    may_diverge = False
    has_diverged = False
    compression_report = None  # the reducer has it

    def __init__(self, exact: Synchronous, shards: Shards) -> None:
        super().__init__(exact)
        self._exact: Synchronous = exact
        self._shards = shards

    @property
    def synchronous(self) -> Synchronous | None:
        """The scheme that averages gradients in the next step."""
        return self._exact.synchronous

    def idle(self, model: chainer.Link) -> None:
        """Do nothing: there are no local steps."""

    def fail(self, error: Exception) -> None:
        """Do nothing: the messages of the join inform the other ranks."""

    def step(self, model: chainer.Link, backward: Backward | None, take_step: TakeStep) -> None:
        """Average gradients, update this rank's parameters, and send them to all ranks; collective."""
        self._shards.forget_gathered()
        if not self._shards.is_settled and self.join is None:
            self._exact.agree_on("the choice of which rank keeps which state", model)
        owners = self._shards.owners(model, may_choose=self.join is None)
        has_all_means = not self._exact.leave_to(model, owners)
        self._exact.step(model, backward, partial(self._shards.take_step, model, take_step, has_all_means))

    def restart(self, model: chainer.Link) -> None:
        """Discard pending averages, and determine the owners again; collective."""
        self._exact.restart(model)
        self._shards.restart()

    def synchronize(self, model: chainer.Link, is_shared: bool) -> bool:
        """Do nothing: the parameters are equal."""
        return self._exact.synchronize(model, is_shared)

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Do nothing: there is only the optimizer's state, which :class:`Shards` saves and loads."""
