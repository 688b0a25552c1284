"""The base class of schemes that use another scheme to average gradients."""

from __future__ import annotations

from mn_optim.roll import Roll
from mn_optim.schemes.scheme import Scheme

__all__ = ["Around"]


class Around:
    """Takes part in a join like the scheme inside.

    Args:
        inside: The scheme that averages gradients.
    """

    def __init__(self, inside: Scheme) -> None:
        self.zero_fill = inside.zero_fill
        self._exact = inside

    @property
    def roll(self) -> Roll | None:
        """Within a join, which ranks have data in the steps that average gradients."""
        return self._exact.roll

    @roll.setter
    def roll(self, roll: Roll | None) -> None:
        self._exact.roll = roll
