"""A dataset for the ranks of a model that get their input from other ranks."""

from __future__ import annotations

from collections.abc import Sized

__all__ = ["create_empty_dataset"]


def create_empty_dataset(dataset: Sized) -> list[tuple[()]]:
    """Return a dataset of the same length whose items are all ``()``.

    Chainer's updaters want a dataset on every rank. A rank whose part of the model begins with a ``recv`` and ends with
    a ``send`` has no use for one, but must count iterations and epochs as the others do.

    Args:
        dataset: The dataset that the other ranks use.

    Returns:
        As many empty tuples as it has items.
    """
    return [()] * len(dataset)
