"""Persistent values averaged over all ranks."""

from mn_extensions import AllreducePersistent as AllreducePersistent
