"""How often the ranks of a node synchronise while they average: often for the caches, rarely if cores are busy.

Small shares stay in the caches, but the ranks wait for each other after each share. This takes a microsecond if every
rank has its own core, and a time slice of the scheduler if another process (a data loader, a BLAS thread, another rank)
is using one of the cores. So both sizes are measured while gradients are averaged, and the better one is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["Pace"]

SHARE_BYTES = (256 * 1024, 4 * 1024 * 1024)
"""How many bytes of a bucket each rank adds up: where cores are free, and where they are contended."""

_FREE, _CONTENDED = range(2)
# More of the time than this is spent waiting only if a rank has to wait for its core.
_SUSPICIOUS = 0.25
# How many averages go by before the choice that is not used is tried again.
_PATIENCE = (8, 32)


class Pace:
    """Chooses the shares for gradients of one layout.

    Attributes:
        used: Which of :data:`SHARE_BYTES` is used: what the ranks have agreed upon.
    """

    def __init__(self) -> None:
        self.used = _FREE
        self._choice = _FREE
        self._tries = False
        self._since_try = 0
        self._seconds: tuple[deque[float], deque[float]] = (deque(maxlen=5), deque(maxlen=5))

    @property
    def proposal(self) -> int:
        """Which of :data:`SHARE_BYTES` this rank would use for the next average; all use the greatest."""
        return 1 - self._choice if self._tries else self._choice

    @property
    def share_bytes(self) -> int:
        """How many bytes each rank adds up in the next average."""
        return SHARE_BYTES[self.used]

    def record(self, seconds: float, waited: float) -> None:
        """Record the last average, which used this layout.

        Args:
            seconds: How long it took the slowest rank.
            waited: How long the rank that waited most waited for others.
        """
        self._seconds[self.used].append(seconds)
        self._since_try = 0 if self.used != self._choice else self._since_try + 1
        other = 1 - self._choice
        if self._seconds[other] and _median(self._seconds[other]) < _median(self._seconds[self._choice]):
            self._choice = other
        is_doubtful = self._choice == _CONTENDED or waited > _SUSPICIOUS * seconds
        self._tries = is_doubtful and self._since_try >= _PATIENCE[self._choice]


def _median(values: Sequence[float]) -> float:  # the library's imports much else
    return sorted(values)[len(values) // 2]
