"""One rank's batches, on all ranks."""

from mn_data import create_multi_node_iterator

__all__ = ["create_multi_node_iterator"]
