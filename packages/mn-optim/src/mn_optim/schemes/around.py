"""What the schemes have in common that have another one average gradients."""

from __future__ import annotations

from mn_optim.roll import Roll
from mn_optim.schemes.scheme import Scheme

__all__ = ["Around"]


class Around:
    """Takes part in a join as the scheme inside does.

    Args:
        inside: Averages gradients.
    """

    def __init__(self, inside: Scheme) -> None:
        self.zero_fill = inside.zero_fill
        self._exact = inside

    @property
    def roll(self) -> Roll | None:
        """Who has data in the steps that average gradients, within a join."""
        return self._exact.roll

    @roll.setter
    def roll(self, roll: Roll | None) -> None:
        self._exact.roll = roll
