"""A dataset for the ranks of a model that get their input from other ranks."""

from __future__ import annotations

from collections.abc import Sized


def create_empty_dataset(dataset: Sized) -> list[tuple[()]]:
    """Return a dataset of the same length whose items are all ``()``.

    Chainer's updaters need a dataset on every rank. A rank whose part of the model begins with a ``recv`` and ends with
    a ``send`` does not need the data, but must count iterations and epochs like the others.

    Args:
        dataset: The dataset that the other ranks use.

    Returns:
        A list of empty tuples, as long as ``dataset``.
    """
    return [()] * len(dataset)
