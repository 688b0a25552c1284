"""Early stopping of all ranks."""

from mn_extensions import MultiNodeEarlyStoppingTrigger

__all__ = ["MultiNodeEarlyStoppingTrigger"]
