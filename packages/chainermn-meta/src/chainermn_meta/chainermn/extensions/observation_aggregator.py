"""An observation of all ranks, put together."""

from mn_extensions import ObservationAggregator

__all__ = ["ObservationAggregator"]
