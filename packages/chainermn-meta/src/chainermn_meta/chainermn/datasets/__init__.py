"""Datasets divided among the ranks."""

from chainermn.datasets import empty_dataset, scatter  # noqa: F401 - scripts reach them without another import

# From the module, so that importing the module later does not replace the function of the same name.
from chainermn.datasets.scatter_dataset import scatter_dataset

from mn_data import (
    DataSizeError,
    create_empty_dataset,
    get_epoch_trigger,
    get_n_iterations_for_one_epoch,
    scatter_index,
)

__all__ = [
    "DataSizeError",
    "create_empty_dataset",
    "get_epoch_trigger",
    "get_n_iterations_for_one_epoch",
    "scatter_dataset",
    "scatter_index",
]
