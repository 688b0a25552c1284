"""The base class of schemes that use another scheme to average gradients."""

from __future__ import annotations

from mn_optim.join_state import JoinState
from mn_optim.schemes.scheme import Scheme

__all__ = ["SchemeWrapper"]


class SchemeWrapper:
    """Takes part in a join like the scheme inside.

    Args:
        inside: The scheme that averages gradients.
    """

    def __init__(self, inside: Scheme) -> None:
        self.zero_fill = inside.zero_fill
        self._exact = inside

    @property
    def join(self) -> JoinState | None:
        """Within a join, which ranks have data in the steps that average gradients."""
        return self._exact.join

    @join.setter
    def join(self, join: JoinState | None) -> None:
        self._exact.join = join
