"""A dataset for ranks that need none."""

from mn_data import create_empty_dataset as create_empty_dataset
