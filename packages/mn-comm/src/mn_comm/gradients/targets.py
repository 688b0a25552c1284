"""The arrays to which means are written: the gradients themselves, if possible."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from mn_comm.basis.placement import zeros_beside
from mn_comm.gradients.agree import Named
from mn_comm.gradients.overlap import FLAGS, OWNS_MEMORY, are_contiguous_and_apart, can_be_written_to, overlapping
from mn_comm.gradients.parts import Spec

_Array = np.ndarray[Any, Any]
_IS_PLAIN = 0x1 | 0x100 | 0x400  # C-contiguous, aligned, writeable

_is_debug: Callable[[], bool] = bool  # called without arguments, it returns False


def check_in_debug_mode(is_debug: Callable[[], bool]) -> None:
    """Check means for values that are not finite, if a function such as ``chainer.is_debug`` returns true."""
    global _is_debug
    _is_debug = is_debug


class Targets:
    """The arrays from which the gradients of one average are read, and to which their means are written.

    A gradient keeps its array, unless the array cannot hold the mean: it is missing, read-only, or shares memory with
    another gradient or with itself. A backward pass can cause this on one rank and not on another.

    The gradients at the positions ``flattened`` have to be one-dimensional, because blocks hold only parts of them.
    """

    def __init__(
        self, params: Sequence[Named], grads: Sequence[Any], specs: Sequence[Spec], flattened: Collection[int] = ()
    ) -> None:
        self._params = params
        self._new: list[int] = []
        self._borrowed: list[tuple[_Array, _Array]] = []
        self.arrays: list[Any] = list(grads)  # to read and to write, one for each gradient
        are_on_host = set(map(type, self.arrays)) <= {np.ndarray}
        if are_on_host or not are_contiguous_and_apart(self.arrays):
            self._replace_unsuitable(specs, are_on_host)
        self._whole = self.arrays
        if flattened:
            self.arrays = list(self.arrays)
            for i in flattened:
                self.arrays[i] = self._flatten(self.arrays[i])

    def finish(self) -> None:
        """Assign arrays that hold the means to ``grad``, where they are not the gradients' arrays already.

        Raises:
            ValueError: A mean is not finite, in debug mode; the same on every rank.
        """
        for array, contiguous in self._borrowed:
            array[...] = contiguous
        for i in self._new:
            param = self._params[i][1]
            # Chainer's parameters check every gradient that is assigned. They offer a way to omit this check, and here,
            # shape and dtype are known to be right.
            unchecked = getattr(param, "_set_grad_without_check", None)
            if unchecked is None:
                param.grad = self._whole[i]
            else:
                unchecked(self._whole[i])
        if _is_debug():
            self._check()

    def _check(self) -> None:
        for (name, _), array in zip(self._params, self._whole, strict=True):
            if not bool((array - array == 0).all()):  # true for finite values, also on a device
                raise ValueError(
                    f"multi_node_mean_grad: training has diverged on some rank: expected finite gradients in debug "
                    f"mode, got NaN or infinity for {name}"
                )

    def _replace_unsuitable(self, specs: Sequence[Spec], are_on_host: bool) -> None:
        flags = functools.reduce(int.__and__, set(map(FLAGS, self.arrays)), -1) if are_on_host else 0
        is_one_twice = len(set(map(id, self.arrays))) < len(self.arrays)
        if flags & _IS_PLAIN != _IS_PLAIN:
            self._replace_what_cannot_be_written_to(specs)
        if not flags & OWNS_MEMORY or is_one_twice:
            for i in overlapping(self.arrays):
                self._replace(i, self.arrays[i].copy())

    def _replace_what_cannot_be_written_to(self, specs: Sequence[Spec]) -> None:
        for i, grad in enumerate(self.arrays):
            if grad is None:
                self._replace(i, zeros_beside(self._params[i][1].data, *specs[i][1:]))
            elif not can_be_written_to(grad):
                self._replace(i, grad.copy())

    def _replace(self, i: int, array: Any) -> None:
        self.arrays[i] = array
        self._new.append(i)

    def _flatten(self, array: _Array) -> _Array:
        if not array.flags.c_contiguous:
            contiguous = np.ascontiguousarray(array)
            self._borrowed.append((array, contiguous))
            array = contiguous
        return array.reshape(-1)
