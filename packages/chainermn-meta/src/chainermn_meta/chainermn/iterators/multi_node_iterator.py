"""An iterator that gives all ranks the batches of one rank."""

from mn_data import create_multi_node_iterator as create_multi_node_iterator
