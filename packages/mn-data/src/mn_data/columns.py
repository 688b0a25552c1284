"""Datasets held in memory as columns of samples, from which samples can be selected, so that only they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from chainer import datasets

__all__ = ["ArrayLayout", "Column", "Layout", "assemble", "can_take", "columns_of", "layout_of", "leaves", "take"]

_Array = np.ndarray[Any, Any]
# Consecutive positions are a range, with which an array can be sliced without a copy.
Positions: TypeAlias = "range | np.ndarray[Any, np.dtype[np.intp]]"


@dataclass(frozen=True)
class ArrayLayout:
    """A column that is an array.

    Attributes:
        dtype: Its dtype, without Python objects.
        row_shape: The shape of one sample.
    """

    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of one sample."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class ObjectsLayout:
    """A column of Python objects."""


@dataclass(frozen=True)
class TableLayout:
    """A dataset of several columns: a ``TupleDataset``, or a ``DictDataset`` if they have names."""

    columns: tuple[Layout, ...]
    names: tuple[str, ...] | None = None


Layout: TypeAlias = "ArrayLayout | ObjectsLayout | TableLayout"


@dataclass(frozen=True)
class Column:
    """One column of a dataset.

    Attributes:
        values: An array, a list or a tuple.
        positions: The positions of the samples in ``values``.
    """

    values: Any
    positions: Positions

    def select(self, indices: Positions) -> Column:
        """Return the column of some of the samples."""
        return Column(self.values, _compose(self.positions, indices))

    def rows(self) -> Any:
        """Return the samples: an array (a view if they are consecutive), or a list."""
        if not isinstance(self.values, np.ndarray):
            return [self.values[i] for i in self.positions]
        rows = self.values[_slice(self.positions)] if isinstance(self.positions, range) else self.values[self.positions]
        return list(rows) if self.values.dtype.hasobject else np.asarray(rows)


def can_take(dataset: Any) -> bool:
    """Return whether the samples of ``dataset`` are held in memory, so that some of them can be selected.

    A derived class may compute its samples differently, so the type has to be exactly one of the known ones.
    """
    if type(dataset) is datasets.SubDataset:
        return can_take(dataset._dataset)
    if type(dataset) is datasets.TupleDataset:
        return all(can_take(column) for column in dataset._datasets)
    if type(dataset) is datasets.DictDataset:
        return all(can_take(column) for column in dataset._datasets.values())
    if type(dataset) in (np.ndarray, np.memmap):
        return bool(dataset.ndim > 0)
    return type(dataset) in (list, tuple)


def layout_of(dataset: Any) -> Layout:
    """Return the layout of a dataset for which :func:`can_take` is true."""
    if type(dataset) is datasets.SubDataset:
        return layout_of(dataset._dataset)
    if type(dataset) is datasets.TupleDataset:
        return TableLayout(tuple(map(layout_of, dataset._datasets)))
    if type(dataset) is datasets.DictDataset:
        return TableLayout(tuple(map(layout_of, dataset._datasets.values())), tuple(dataset._datasets))
    if isinstance(dataset, np.ndarray) and not dataset.dtype.hasobject:
        return ArrayLayout(dataset.dtype, dataset.shape[1:])
    return ObjectsLayout()


def leaves(layout: Layout) -> Iterator[ArrayLayout | ObjectsLayout]:
    """Yield the columns of a layout, in the order of :func:`columns_of`."""
    if isinstance(layout, TableLayout):
        for column in layout.columns:
            yield from leaves(column)
    else:
        yield layout


def columns_of(dataset: Any, positions: Positions | None = None) -> Iterator[Column]:
    """Yield the columns of a dataset for which :func:`can_take` is true.

    Args:
        dataset: The dataset.
        positions: The requested samples, each at least 0 and below ``len(dataset)``; by default all.

    Yields:
        One column after another.
    """
    if positions is None:
        positions = range(len(dataset))
    if type(dataset) is datasets.SubDataset:
        yield from columns_of(dataset._dataset, _compose(_positions_of(dataset), positions))
    elif type(dataset) is datasets.TupleDataset:
        for column in dataset._datasets:
            yield from columns_of(column, positions)
    elif type(dataset) is datasets.DictDataset:
        for column in dataset._datasets.values():
            yield from columns_of(column, positions)
    else:
        yield Column(dataset, positions)


def assemble(layout: Layout, columns: Iterable[Any]) -> Any:
    """Build a dataset from columns.

    Args:
        layout: The layout of the dataset.
        columns: Arrays and lists, one for each leaf of the layout.

    Returns:
        An array, a list, a ``TupleDataset`` or a ``DictDataset``.
    """
    left = iter(columns)
    if not isinstance(layout, TableLayout):
        return next(left)
    parts: Sequence[Any] = [assemble(column, left) for column in layout.columns]
    if layout.names is None:
        return datasets.TupleDataset(*parts)
    return datasets.DictDataset(**dict(zip(layout.names, parts, strict=True)))


def take(dataset: Any, indices: Positions) -> Any:
    """Return a dataset that holds the samples at ``indices``, in that order, and no others.

    Args:
        dataset: One for which :func:`can_take` is true.
        indices: One-dimensional integers, each at least 0 and below ``len(dataset)``.

    Returns:
        A dataset of the same kind and of length ``len(indices)``.
    """
    return assemble(layout_of(dataset), (column.rows() for column in columns_of(dataset, indices)))


def _positions_of(dataset: datasets.SubDataset) -> Positions:
    """Return the positions of a SubDataset's samples in the dataset that it is a part of."""
    positions = range(dataset._start, dataset._finish)
    order = dataset._order
    return positions if order is None else np.asarray(order, dtype=np.intp)[_slice(positions)]


def _compose(outer: Positions, inner: Positions) -> Positions:
    if isinstance(outer, range):
        if isinstance(inner, range):
            return outer[_slice(inner)]
        return inner + outer.start if outer.start else inner
    return outer[_slice(inner)] if isinstance(inner, range) else outer[inner]


def _slice(positions: range) -> slice:
    return slice(positions.start, positions.stop)
