"""Datasets divided among the ranks, under the module name of ChainerMN 1."""

from mn_data import DataSizeError, get_epoch_trigger, get_n_iterations_for_one_epoch, scatter_dataset

__all__ = ["DataSizeError", "get_epoch_trigger", "get_n_iterations_for_one_epoch", "scatter_dataset"]
