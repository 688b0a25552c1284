"""Datasets divided among the ranks, and iterators that give several ranks the same batches."""

import mn_comm  # noqa: F401 - before mpi4py, which it keeps from initialising MPI in worker processes
import mn_compat  # noqa: F401 - it makes Chainer importable
from mn_data.elastic_iterator import ElasticIterator
from mn_data.empty import create_empty_dataset
from mn_data.epochs import get_epoch_trigger, get_n_iterations_for_one_epoch
from mn_data.multi_node_iterator import create_multi_node_iterator
from mn_data.scatter import DataSizeError, scatter_dataset, scatter_index
from mn_data.synchronized_iterator import create_synchronized_iterator
from mn_data.uneven_iterator import create_uneven_iterator

__all__ = [
    "DataSizeError",
    "ElasticIterator",
    "create_empty_dataset",
    "create_multi_node_iterator",
    "create_synchronized_iterator",
    "create_uneven_iterator",
    "get_epoch_trigger",
    "get_n_iterations_for_one_epoch",
    "scatter_dataset",
    "scatter_index",
]
