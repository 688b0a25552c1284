"""Averaging the persistent values of a model, such as the running mean of a batch normalisation, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda
from chainer.training import PRIORITY_WRITER, Extension

from mn_comm import CommunicatorBase, expect_same, transact

_Found = tuple[str, chainer.Link, str]


class AllreducePersistent(Extension):  # type: ignore[misc]  # Chainer has no types
    """Averages the floating-point persistent values of a model over all ranks, in any memory layout.

    Collective. Once before an evaluation or a snapshot is enough.

    Args:
        model: The model, the same on every rank.
        comm: The ranks.

    Example:
        >>> model = L.BatchNormalization(3)
        >>> model.avg_mean[:] = comm.rank
        >>> chainermn.extensions.AllreducePersistent(model, comm)()
        >>> model.avg_mean
        array([0.5, 0.5, 0.5], dtype=float32)
    """

    trigger = 1, "epoch"
    priority = PRIORITY_WRITER + 1  # before evaluators

    def __init__(self, model: chainer.Link, comm: CommunicatorBase) -> None:
        if not isinstance(model, chainer.Link):
            raise TypeError(f"expected a chainer.Link for model, got {type(model).__name__}")
        self.model = model
        self.comm = comm

    def __call__(self, trainer: Any = None) -> None:
        """Average; collective.

        Raises:
            ValueError: The ranks' models differ in the names, shapes or dtypes of their persistent values (on every
                rank).
        """
        found = list(_floating(self.model))
        # They are written only when all are known: after a loss, they are averaged again.
        for (_, link, name), mean in zip(found, transact(self.comm, partial(self._means, found)), strict=True):
            _set(link, name, mean)

    def _means(self, found: Sequence[_Found]) -> list[Any]:
        expect_same(self.comm, "persistent values", [path for path, _, _ in found])
        values = [np.asarray(cuda.to_cpu(getattr(link, name))) for _, link, name in found]
        wide = [value.astype(np.result_type(value, np.float32)) for value in values]  # the sum may overflow otherwise
        return [self.comm.allreduce(value) / self.comm.size for value in wide]


def _set(link: chainer.Link, name: str, mean: Any) -> None:
    value = getattr(link, name)
    if isinstance(value, (float, np.generic)):  # such arrays are read-only
        setattr(link, name, type(value)(mean))
    else:
        value[...] = cuda.get_array_module(value).asarray(mean)


def _floating(model: chainer.Link) -> Iterator[_Found]:
    """Yield path, link and attribute of each floating persistent value, in the order of paths."""
    found = (
        (f"{path}/{name}", link, name)
        for path, link in model.namedlinks()
        for name in link._persistent  # noqa: SLF001 - Chainer has no public name for it
    )
    for path, link, name in sorted(found, key=lambda each: each[0]):
        value = getattr(link, name)
        dtype = getattr(value, "dtype", None)
        if isinstance(value, float) or (dtype is not None and dtype.kind in "fc"):
            yield path, link, name
