"""The same order of samples on all ranks."""

from mn_data import create_synchronized_iterator

__all__ = ["create_synchronized_iterator"]
