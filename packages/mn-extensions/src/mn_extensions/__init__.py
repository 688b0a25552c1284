"""Trainer extensions that know of the other ranks."""

import mn_compat  # noqa: F401 - first: it makes Chainer importable
from mn_extensions.evaluator import create_multi_node_evaluator

__all__ = ["create_multi_node_evaluator"]
