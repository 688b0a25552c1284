"""A dataset for ranks that need none."""

from mn_data import create_empty_dataset

__all__ = ["create_empty_dataset"]
