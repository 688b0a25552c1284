"""Checkpoints of all ranks."""

from mn_extensions.checkpoint import MultiNodeCheckpointer as _MultiNodeCheckpointer
from mn_extensions.checkpoint import create_multi_node_checkpointer

__all__ = ["_MultiNodeCheckpointer", "create_multi_node_checkpointer"]
