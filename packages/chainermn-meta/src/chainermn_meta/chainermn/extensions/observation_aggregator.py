"""Observations averaged over all ranks."""

from mn_extensions import ObservationAggregator

__all__ = ["ObservationAggregator"]
