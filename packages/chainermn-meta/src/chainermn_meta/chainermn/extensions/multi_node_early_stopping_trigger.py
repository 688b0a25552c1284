"""Early stopping of all ranks."""

from mn_extensions import MultiNodeEarlyStoppingTrigger, ObservationAggregator

__all__ = ["MultiNodeEarlyStoppingTrigger", "ObservationAggregator"]
