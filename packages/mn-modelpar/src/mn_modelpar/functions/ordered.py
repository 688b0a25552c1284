"""The base class of functions that communicate: their backward methods run in the same order on all ranks."""

from __future__ import annotations

import chainer


class Ordered(chainer.FunctionNode):  # type: ignore[misc]  # Chainer has no types
    """A function whose backward method runs before those of all that were called before it, if a pass reaches both.

    Chainer runs the deepest function of a graph first. Of two collective functions, this may be a different one on each
    rank if their graphs differ; then the gradients of one would be added to those of the other. All ranks call these
    functions in the same order, so the reverse of this order is the same everywhere, too.
    """

    _deepest = 0
    _depth = 0

    @property
    def rank(self) -> int:
        """How deep the function is in the graph: ``rank`` is Chainer's word for it."""
        return self._depth

    @rank.setter
    def rank(self, depth: int) -> None:
        self._depth = Ordered._deepest = max(depth, Ordered._deepest + 1)
