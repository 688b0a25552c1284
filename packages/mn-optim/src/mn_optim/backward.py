"""A backward pass that reports when the gradient of each parameter is final; Chainer's own does so only at its end.

It *is* Chainer's own walk over the graph: the same functions in the same order, and the same additions. So gradients
are equal bit for bit, and hooks, ``retain_grad`` and double backprop need no special treatment. It relies on two places
in Chainer 7.8.1, whose code will not change any more: it gets access to the table in which the walk keeps gradients, so
that a gradient can be taken out early; and a function hook tells which function has just been passed. Before the walk,
it counts how many functions each leaf of the graph goes into.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import chainer
from chainer import _backprop_utils

OnFinal = Callable[[chainer.Variable], None]


def backward(loss: chainer.Variable, loss_scale: float | None, on_final: OnFinal) -> None:
    """Compute gradients as ``loss.backward(loss_scale=loss_scale)`` does, and report each one when it is final.

    Args:
        loss: The variable to start from.
        loss_scale: The factor for its gradient; ``None`` for 1.
        on_final: Called with a leaf of the graph when its gradient will not change any more in this pass. Leaves that
            may not be final before the end are not reported: those behind a function that gave no gradient.
    """
    watch = _Watch(loss, loss_scale, on_final)
    with watch, _seam.tell(watch):
        loss.backward(loss_scale=loss_scale)


class _Watch(chainer.FunctionHook):  # type: ignore[misc]
    """Takes a leaf's gradient out of the table after the last function that contributes to it."""

    name = "mn_optim.backward"

    def __init__(self, loss: chainer.Variable, loss_scale: float | None, on_final: OnFinal) -> None:
        self.table: Any = None
        self._leaves_of = _leaves_by_function(loss)
        self._remaining = Counter(itertools.chain.from_iterable(self._leaves_of.values()))
        self._loss_scale = loss_scale
        self._on_final = on_final

    def backward_postprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        """Count down the leaves of a function that was passed; called by Chainer."""
        for leaf in self._leaves_of.pop(function, ()):
            self._remaining[leaf] -= 1
            if not self._remaining[leaf]:
                self._finish(leaf)

    def _finish(self, leaf: Any) -> None:
        variable = leaf.get_variable_or_none()
        if self.table is None or variable is None:
            return
        # Chainer does this at the end of its walk; then it finds this gradient and does not change it.
        variable._set_grad_var_without_check(self.table.pop(leaf))  # noqa: SLF001
        variable._loss_scale = self._loss_scale  # noqa: SLF001
        self._on_final(variable)


class _Seam:
    """Replaces the class of Chainer's table while some thread waits for the next table."""

    def __init__(self) -> None:
        self._original = _backprop_utils.GradTable
        self._lock = threading.Lock()
        self._waiting: dict[int, _Watch] = {}
        self._users = 0

    def __call__(self, *args: Any, **kwds: Any) -> Any:
        table = self._original(*args, **kwds)
        with self._lock:
            watch = self._waiting.pop(threading.get_ident(), None)  # walks within this one have their own tables
        if watch is not None:
            watch.table = table
        return table

    @contextmanager
    def tell(self, watch: _Watch) -> Iterator[None]:
        """Make the next walk of this thread keep its gradients in a table that the watch can access."""
        with self._lock:
            self._waiting[threading.get_ident()] = watch
            self._users += 1
            _backprop_utils.GradTable = self
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(threading.get_ident(), None)
                self._users -= 1
                if not self._users:
                    _backprop_utils.GradTable = self._original


_seam = _Seam()


def _leaves_by_function(loss: chainer.Variable) -> dict[Any, list[Any]]:
    """Return, for each function of the graph, the leaves among its inputs that need a gradient.

    They are in the order of the inputs, so that gradients become final in the same order in every run; the result of
    compression depends on this order.
    """
    leaves: dict[Any, list[Any]] = {}
    functions = [] if loss.creator_node is None else [loss.creator_node]
    while functions:
        function = functions.pop()
        if function in leaves:
            continue
        inputs = [node for node in function.inputs if node.requires_grad]
        leaves[function] = list(dict.fromkeys(node for node in inputs if node.creator_node is None))
        functions.extend(node.creator_node for node in inputs if node.creator_node is not None)
    return leaves
