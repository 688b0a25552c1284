"""What a gradient reducer keeps from one step to the next, for a snapshot: the state of compression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis.protocols import Model
from mn_comm.gradients.agree import select
from mn_comm.gradients.interfaces import JoinMessages
from mn_comm.gradients.layout import Layout, Layouts
from mn_comm.ranks.background import Future, Worker

if TYPE_CHECKING:
    from mn_comm.gradients.compression import CompressionReport, Compressor
    from mn_comm.gradients.strategy import Strategy


class ReducerState:
    """The methods of a gradient reducer that do something only with compression."""

    _strategy: Strategy
    _worker: Worker | None
    _layouts: Layouts

    def _use_compressor(self, compressor: Compressor | None) -> None:
        self._compressor = compressor
        self._factor = 1.0
        self._is_used = True

    @property
    def compression_report(self) -> CompressionReport | None:
        """The effect of compression in the last step on this rank; ``None`` without compression."""
        return None if self._compressor is None else self._compressor.report()

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the state of compression on this rank, for a snapshot: arrays by name; not collective."""
        if self._compressor is None:
            return {}
        return Future(self._compressor.state, self._worker).wait()  # after running reductions

    def load_state(self, state: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Continue with this rank's result of :meth:`state`, or with none if it is empty; call it on every rank.

        If a state does not match the next gradients, it is discarded on all ranks, with a warning.
        """
        if self._compressor is not None:
            compressor = self._compressor
            self._layouts = Layouts()  # not later: a signal handler may raise while this waits
            Future(lambda: compressor.load(state), self._worker).wait()

    def remembered_order(self, model: Model) -> list[str] | None:
        """Return the order of all initialised parameters, for :meth:`start`, that belongs to a loaded state, if any."""
        if self._compressor is None:
            return None
        return self._compressor.loaded_order(frozenset(name for name, _ in select(model, True).params))

    def scale_errors(self, scale: float) -> None:
        """Set the factor of gradients from now on, above 0, such as a loss scale; call it alike on every rank.

        Compression multiplies the part that it has not sent yet by the change of this factor.
        """
        compressor = self._compressor
        if compressor is not None and compressor.scale != scale / self._factor:
            Future(lambda: compressor.use_scale(scale / self._factor), self._worker).wait()

    def _adopt(self, layout: Layout) -> None:
        """Prepare compression for a new layout; collective."""
        assert self._compressor is not None
        for dropped in self._layouts.make_room():
            self._compressor.forget(dropped.number)
        self._compressor.adopt(self._strategy.context.ranks, layout.number, layout.specs, layout.order, layout.form)

    def _use_factor(self, join: JoinMessages | None) -> None:
        """Let compression know how a join multiplies the next means: what it has omitted has been multiplied already.

        Ranks may come and go; what one step omits and another one sends counts as in the step that has omitted it.
        """
        assert self._compressor is not None
        factor = 1.0 if join is None else join.factor
        self._is_used = factor != 0
        if factor not in (0, self._factor):
            self._compressor.use_scale(self._compressor.scale * self._factor / factor)
            self._factor = factor

    def _end(self, layout: int, succeeded: bool) -> None:
        """Keep or discard the part that compression has omitted, in the same way on all ranks."""
        assert self._compressor is not None
        if succeeded and self._is_used:
            self._compressor.commit(layout)
        else:
            self._compressor.roll_back()
