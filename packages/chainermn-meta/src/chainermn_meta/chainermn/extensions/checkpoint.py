"""Checkpoints of all ranks."""

from mn_extensions import create_multi_node_checkpointer

__all__ = ["create_multi_node_checkpointer"]
