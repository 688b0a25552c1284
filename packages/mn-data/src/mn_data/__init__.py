"""Datasets shared out among ranks."""

import mn_compat  # noqa: F401 - first: it makes Chainer importable
from mn_data.empty import create_empty_dataset
from mn_data.scatter import DataSizeError, scatter_dataset, scatter_index

__all__ = ["DataSizeError", "create_empty_dataset", "scatter_dataset", "scatter_index"]
