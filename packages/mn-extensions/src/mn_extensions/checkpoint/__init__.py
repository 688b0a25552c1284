"""Checkpoints that exist either on all ranks or on none."""

from mn_extensions.checkpoint.checkpointer import MultiNodeCheckpointer, create_multi_node_checkpointer

__all__ = ["MultiNodeCheckpointer", "create_multi_node_checkpointer"]
