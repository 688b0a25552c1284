"""The same order of samples on all ranks."""

from mn_data import create_synchronized_iterator as create_synchronized_iterator
