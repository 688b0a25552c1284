"""Taking some of a dataset's samples out, so that only these travel."""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer import datasets

__all__ = ["can_take", "take"]


def can_take(dataset: Any) -> bool:
    """Return whether the samples of ``dataset`` are held in memory, so that some of them can be taken out."""
    if isinstance(dataset, datasets.SubDataset):
        return can_take(dataset._dataset)
    if type(dataset) is datasets.TupleDataset:
        return all(can_take(column) for column in dataset._datasets)
    if type(dataset) is datasets.DictDataset:
        return all(can_take(column) for column in dataset._datasets.values())
    return type(dataset) in (list, tuple) or isinstance(dataset, np.ndarray)


def take(dataset: Any, indices: np.ndarray[Any, np.dtype[np.intp]]) -> Any:
    """Return a dataset that holds the samples at ``indices``, in that order, and no others.

    Args:
        dataset: One for which :func:`can_take` is true.
        indices: One-dimensional integers, each at least 0 and below ``len(dataset)``.

    Returns:
        A dataset of the same kind and of length ``len(indices)``.
    """
    if isinstance(dataset, datasets.SubDataset):
        return take(dataset._dataset, _indices_of(dataset)[indices])
    if type(dataset) is datasets.TupleDataset:
        return datasets.TupleDataset(*(take(column, indices) for column in dataset._datasets))
    if type(dataset) is datasets.DictDataset:
        return datasets.DictDataset(**{name: take(column, indices) for name, column in dataset._datasets.items()})
    if isinstance(dataset, np.ndarray):
        return _rows(dataset, indices)
    return [dataset[i] for i in indices]


def _indices_of(dataset: datasets.SubDataset) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the positions that the samples of a SubDataset have in the dataset it is a part of."""
    positions = np.arange(dataset._start, dataset._finish, dtype=np.intp)
    order = dataset._order
    return positions if order is None else np.asarray(order, dtype=np.intp)[positions]


def _rows(array: np.ndarray[Any, Any], indices: np.ndarray[Any, np.dtype[np.intp]]) -> Any:
    """Return rows of an array; a view where they follow one another, so that nothing is copied before it travels."""
    if len(indices) and indices[-1] - indices[0] + 1 == len(indices) and (np.diff(indices) == 1).all():
        return array[indices[0] : indices[-1] + 1]
    return array[indices]
