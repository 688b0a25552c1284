"""Observations averaged over all ranks."""

from mn_extensions import ObservationAggregator as ObservationAggregator
