"""Iterators that give several ranks the same batches."""

from chainermn.iterators import multi_node_iterator, synchronized_iterator  # noqa: F401 - scripts reach them without another import

from mn_data import ElasticIterator, create_multi_node_iterator, create_synchronized_iterator, create_uneven_iterator

__all__ = ["ElasticIterator", "create_multi_node_iterator", "create_synchronized_iterator", "create_uneven_iterator"]
