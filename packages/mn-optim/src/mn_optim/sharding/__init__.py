"""Optimizer state that is divided among the ranks: the partition, a step, and snapshots."""

from mn_optim.sharding.shards import Shards

__all__ = ["Shards"]
