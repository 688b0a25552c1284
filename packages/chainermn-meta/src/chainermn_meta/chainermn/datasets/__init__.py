"""Datasets shared out among ranks."""

from mn_data import DataSizeError, create_empty_dataset, scatter_dataset, scatter_index

__all__ = ["DataSizeError", "create_empty_dataset", "scatter_dataset", "scatter_index"]
