"""What tests of scripts need."""

from chainermn.testing.device import get_device

__all__ = ["get_device"]
