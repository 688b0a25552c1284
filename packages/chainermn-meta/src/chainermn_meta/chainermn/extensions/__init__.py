"""Trainer extensions that know of the other ranks."""

from mn_extensions import create_multi_node_evaluator

__all__ = ["create_multi_node_evaluator"]
