"""The common parameters of all ranks at their last meeting, and the outer optimizer that updates them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import chainer
import numpy as np

from mn_comm.building_blocks import GradientReducer, Reduction
from mn_optim.schemes.arrays import Arrays
from mn_optim.schemes.parameters import set_value, value_of
from mn_optim.serialized import read, serialize_compression

Average = Callable[[chainer.Link], Reduction | None]
"""Averages gradients, or begins to average them in the background."""


class Fragment:
    """Some parameters of a model, in two copies: the rank's own, and those that all ranks have in common.

    The difference between a rank's own parameters and the common ones is sent like a gradient; its negative is the
    gradient of the common parameters.

    Args:
        index: Which fragment it is.
        named: The names and parameters of the model.
        arrays: The initial values of the common parameters, by name; they are copied.
        outer: The outer optimizer; it is copied.
        average: Averages gradients over all ranks.
        reducer: What averages them, if it is not the communicator itself; it may keep a part that it has not sent.

    Attributes:
        index: Which fragment it is.
        has_moved: Whether the rank's own parameters may differ from the common ones.
        due: At which step the rank waits for the pending exchange; ``None`` if there is none.
    """

    def __init__(
        self,
        index: int,
        named: Sequence[tuple[str, chainer.Parameter]],
        arrays: Mapping[str, Any],
        outer: chainer.Optimizer,
        average: Average,
        reducer: GradientReducer | None,
    ) -> None:
        self.index = index
        self.has_moved = False
        self.due: int | None = None
        self._named = named
        self._common = Arrays({name: arrays[name].copy() for name, _ in named})
        self._outer = copy.deepcopy(outer)
        self._outer.setup(self._common)
        self._average = average
        self._reducer = reducer
        self._under_way: Reduction | None = None

    def measure(self, scale: float) -> None:
        """Compute the change of this rank's parameters; not collective.

        Args:
            scale: The factor for the change. The mean of all ranks is not multiplied by it: the part that compression
                omits is in the units of its input.

        Raises:
            ValueError: The shape of a parameter has changed since fragments were created.
        """
        for (name, param), common in zip(self._named, self._common.params(), strict=True):
            own = value_of(param)
            if own.shape != common.shape:
                raise ValueError(
                    f"local steps: expected {name} to keep its shape {common.shape} between meetings, got {own.shape}"
                )
            grad = common.data.copy()
            grad -= own if self.has_moved else common.data
            if scale != 1:
                grad *= scale
            common.grad = grad

    @property
    def frozen(self) -> Iterator[str]:
        """The names of parameters that this rank's optimizer does not update now."""
        return (name for name, param in self._named if not getattr(param.update_rule, "enabled", True))

    def launch(self, due: int, held: Collection[str]) -> None:
        """Send the measured change of this rank's parameters; collective.

        Args:
            due: At which step to wait for the mean.
            held: The names of parameters that are frozen on all ranks: the outer optimizer must not move them either.
        """
        for name, common in self._common.namedparams():
            common.update_rule.enabled = name not in held
        under_way = self._average(self._common)
        if under_way is not None:
            try:
                under_way.ready_all()
            except BaseException:
                under_way.abandon()
                raise
        self._under_way, self.due, self.has_moved = under_way, due, False

    def land(self, alpha: float) -> None:
        """Wait for the mean, let the outer optimizer take a step, and mix the result with the rank's own parameters."""
        self._arrive()
        self.has_moved = True  # until all parameters have been written: a signal handler may raise
        self._outer.update()
        self.due = None
        self._common.cleargrads()
        for (_, param), common in zip(self._named, self._common.params(), strict=True):
            own = value_of(param)
            set_value(param, common.data if alpha == 1 else own + alpha * (common.data - own))
        self.has_moved = alpha != 1

    @property
    def common(self) -> Iterator[tuple[str, chainer.Parameter]]:
        """The common parameters, with their names."""
        return self._common.namedparams()

    def forget(self) -> None:
        """Wait for the pending exchange, and discard it and the part that was not sent; collective."""
        if self._under_way is not None:
            self._under_way.drain()
        if self._reducer is not None:
            self._reducer.load_state({})
        self._under_way = self.due = None

    def _arrive(self) -> None:
        """Wait until the mean is in the gradients of the common parameters."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def serialize(self, serializer: Any) -> None:
        """Save or load the state, except for the common parameters; not collective."""
        if self.due is not None:
            self._arrive()
        is_writer = isinstance(serializer, chainer.Serializer)
        has_outer_state = self._outer.t > 0
        if is_writer:
            flags = [self.has_moved, has_outer_state, -1 if self.due is None else self.due]
            serializer("flags", np.array(flags))
        else:
            moved, has_outer_state, due = read(serializer, "flags")
            self.has_moved, self.due = bool(moved), None if due < 0 else int(due)
        for name, common in self._common.namedparams():
            if self.due is not None and is_writer:
                serializer["mean"](name, common.grad)
                serializer["enabled"](name, np.array(common.update_rule.enabled))
            elif self.due is not None:
                common.grad = common.device.send(read(serializer["mean"], name))
                enabled = read(serializer["enabled"], name)
                common.update_rule.enabled = enabled is None or bool(enabled)
        if self._reducer is not None:
            serialize_compression(serializer, self._reducer)
        if has_outer_state:  # Chainer would raise if there is no state yet
            self._outer.serialize(serializer["outer"])


def cut(arrays: Mapping[str, Any], n: int) -> list[list[str]]:
    """Divide the names of arrays into at most ``n`` nonempty parts of about equal bytes; the same on every rank."""
    parts: list[list[str]] = [[] for _ in range(min(n, len(arrays)))]
    sizes = [0] * len(parts)
    for name, array in sorted(arrays.items(), key=lambda each: (-each[1].nbytes, each[0])):
        smallest = min(range(len(parts)), key=lambda i: (sizes[i], len(parts[i]), i))
        parts[smallest].append(name)
        sizes[smallest] += array.nbytes
    return [sorted(part) for part in parts]
