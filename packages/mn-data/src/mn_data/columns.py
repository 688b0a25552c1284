"""Datasets held in memory as columns of samples, from which samples can be selected, so that only they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from chainer import datasets

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
class TableLayout:
    """A dataset of several columns: a ``TupleDataset``, or a ``DictDataset`` if they have names."""

    columns: tuple[Layout, ...]
    names: tuple[str, ...] | None = None


_TABLES = (datasets.TupleDataset, datasets.DictDataset)
Layout: TypeAlias = "ArrayLayout | TableLayout | None"
"""The layout of a dataset; ``None`` for a column of Python objects."""


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
    if type(dataset) in _TABLES:
        return all(map(can_take, _parts_of(dataset)))
    if type(dataset) in (np.ndarray, np.memmap):
        return bool(dataset.ndim > 0)
    return type(dataset) in (list, tuple)


def leaves(layout: Layout) -> Iterator[ArrayLayout | None]:
    """Yield the columns of a layout, in the order of :func:`columns_of`."""
    if isinstance(layout, TableLayout):
        for column in layout.columns:
            yield from leaves(column)
    else:
        yield layout


def columns_of(dataset: Any, positions: Positions | None = None) -> tuple[Layout, list[Column]]:
    """Return the layout and the columns of a dataset for which :func:`can_take` is true.

    Args:
        dataset: The dataset.
        positions: The requested samples, each at least 0 and below ``len(dataset)``; by default all.

    Returns:
        The layout, and one column for each of its leaves.
    """
    if positions is None:
        positions = range(len(dataset))
    if type(dataset) is datasets.SubDataset:
        return columns_of(dataset._dataset, _compose(_positions_of(dataset), positions))
    if type(dataset) in _TABLES:
        parts = [columns_of(part, positions) for part in _parts_of(dataset)]
        names = tuple(dataset._datasets) if type(dataset) is datasets.DictDataset else None
        return TableLayout(tuple(layout for layout, _ in parts), names), [each for _, part in parts for each in part]
    is_array = isinstance(dataset, np.ndarray) and not dataset.dtype.hasobject
    return ArrayLayout(dataset.dtype, dataset.shape[1:]) if is_array else None, [Column(dataset, positions)]


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


def _parts_of(table: Any) -> Iterable[Any]:
    """Return the parts of a TupleDataset or a DictDataset, each of which is a dataset."""
    return table._datasets.values() if type(table) is datasets.DictDataset else table._datasets  # type: ignore[no-any-return]


def _positions_of(dataset: datasets.SubDataset) -> Positions:
    """Return the positions of a SubDataset's samples in the dataset that it is a part of."""
    positions = range(dataset._start, dataset._finish)
    order = dataset._order
    return positions if order is None else np.asarray(order, dtype=np.intp)[_slice(positions)]


def _compose(outer: Positions, inner: Positions) -> Positions:
    if isinstance(inner, range):
        return outer[_slice(inner)]
    # A negative index counts from the end of the outer part.
    return inner + np.where(inner < 0, outer.stop, outer.start) if isinstance(outer, range) else outer[inner]


def _slice(positions: range) -> slice:
    return slice(positions.start, positions.stop)
