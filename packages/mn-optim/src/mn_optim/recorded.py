"""The optimizer that is made when a timeline is kept: what an update consists of are spans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import chainer

from mn_comm import span
from mn_optim.optimizer import MultiNodeOptimizer
from mn_optim.schemes import Backward

__all__ = ["RecordedOptimizer"]

_F = TypeVar("_F", bound=Callable[..., Any])


class RecordedOptimizer(MultiNodeOptimizer):
    """A multi-node optimizer with the spans ``step``, ``forward``, ``backward`` and ``update``."""

    __slots__ = ()

    def update(self, lossfun: Callable[..., chainer.Variable] | None = None, *args: Any, **kwds: Any) -> None:
        """Average the gradients over all ranks and take a step; collective."""
        with span("step"):
            super().update(None if lossfun is None else _recorded("forward", lossfun), *args, **kwds)

    def _forward(self, model: chainer.Link, loss: chainer.Variable) -> Backward:
        return _recorded("backward", super()._forward(model, loss))

    def _step(self) -> None:
        with span("update"):
            super()._step()


def _recorded(name: str, function: _F) -> _F:
    def run(*args: Any, **kwds: Any) -> Any:
        with span(name):
            return function(*args, **kwds)

    return cast(_F, run)
