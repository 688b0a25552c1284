"""Iterators that give several ranks the same batches."""

from mn_data import create_multi_node_iterator, create_synchronized_iterator

__all__ = ["create_multi_node_iterator", "create_synchronized_iterator"]
