"""Checkpoints of all ranks that exist as a whole or not at all."""

from mn_extensions.checkpoint.checkpointer import MultiNodeCheckpointer, create_multi_node_checkpointer

__all__ = ["MultiNodeCheckpointer", "create_multi_node_checkpointer"]
