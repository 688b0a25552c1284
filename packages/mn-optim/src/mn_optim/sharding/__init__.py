"""Optimizer state of which each rank has a part: which one, a step with it, and its snapshots."""

from mn_optim.sharding.shards import Shards

__all__ = ["Shards"]
