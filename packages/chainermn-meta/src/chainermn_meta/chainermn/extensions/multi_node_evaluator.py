"""Evaluators of all ranks."""

from mn_extensions import GenericMultiNodeEvaluator, create_multi_node_evaluator

__all__ = ["GenericMultiNodeEvaluator", "create_multi_node_evaluator"]
