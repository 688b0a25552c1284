"""Helpers for tests of scripts."""

from chainermn.testing.device import get_device

__all__ = ["get_device"]
