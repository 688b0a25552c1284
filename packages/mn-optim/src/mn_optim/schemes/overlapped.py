"""The scheme that averages each gradient during the backward pass, as soon as it is final."""

from __future__ import annotations

from collections.abc import Callable

import chainer

from mn_comm import raise_on_all
from mn_optim.schemes.scheme import Backward, Synchronous


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


def _run(backward: Backward, model: chainer.Link, on_final: Callable[[str], None]) -> None:
    """Compute gradients, and report the names of the model's parameters as their gradients become final."""
    name_of = {id(param): name for name, param in model.namedparams() if param.data is not None}

    def tell(variable: chainer.Variable) -> None:
        name = name_of.get(id(variable))
        if name is not None:
            on_final(name)

    backward(tell)
