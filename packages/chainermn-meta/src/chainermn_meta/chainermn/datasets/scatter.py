"""Datasets divided among the ranks."""

from mn_data import DataSizeError, get_epoch_trigger, get_n_iterations_for_one_epoch, scatter_dataset, scatter_index

__all__ = ["DataSizeError", "get_epoch_trigger", "get_n_iterations_for_one_epoch", "scatter_dataset", "scatter_index"]
