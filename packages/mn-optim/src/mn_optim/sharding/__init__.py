"""Optimizer state that is divided among the ranks: the partition, a step, and snapshots."""
