"""The size of the shares that ranks of a node add up: small for the caches, large if cores are busy.

Small shares stay in the caches, but the ranks wait for each other after each share. This takes a microsecond if every
rank has its own core, and a time slice of the scheduler if another process (a data loader, a BLAS thread, another rank)
is using one of the cores. So both sizes are measured while gradients are averaged, and the better one is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

SHARE_BYTES = (256 * 1024, 4 * 1024 * 1024)
"""How many bytes of a bucket each rank adds up: where cores are free, and where they are contended."""

_FREE, _CONTENDED = range(2)
_FIRST = (_FREE, _CONTENDED, _FREE, _CONTENDED)  # the first averages of a layout, in which both are measured
_SUSPICIOUS = 0.25  # if a larger part of the time is spent waiting, a rank has to wait for its core
_PATIENCE = (8, 32)  # after this many averages, the other choice is tried again
_SLOWER = 1.5  # if averages have become this many times slower since the choice was made, the other one is tried again
_LAST = 5


class ShareSize:
    """Chooses the shares for gradients of one layout."""

    def __init__(self) -> None:
        self.used = _FREE  # the index in SHARE_BYTES on which the ranks have agreed
        self._choice = _FREE
        self._tries = False
        self._since_try = 0
        self._count = 0
        self._expected = 0.0
        self._seconds: tuple[deque[float], deque[float]] = (deque(maxlen=_LAST), deque(maxlen=_LAST))

    @property
    def proposal(self) -> int:
        """The index in :data:`SHARE_BYTES` that this rank proposes for the next average; all ranks use the greatest."""
        if self._count < len(_FIRST):
            return _FIRST[self._count]
        return 1 - self._choice if self._tries else self._choice

    @property
    def share_bytes(self) -> int:
        """How many bytes each rank adds up in the next average."""
        return SHARE_BYTES[self.used]

    def record(self, seconds: float, waited: float) -> None:
        """Record the slowest rank's time for the last average of this layout, and the longest wait of any rank.

        All ranks record the same numbers.
        """
        self._count += 1
        self._seconds[self.used].append(seconds)
        if self._count < len(_FIRST):
            return
        self._since_try = 0 if self.used != self._choice else self._since_try + 1
        other = 1 - self._choice
        # The first averages also fill caches and tables: the better one of two counts.
        typical = min if self._count == len(_FIRST) else _median
        if self._seconds[other] and typical(self._seconds[other]) < typical(self._seconds[self._choice]):
            self._choice, self._expected = other, 0.0
        usual = _median(self._seconds[self._choice])
        if len(self._seconds[self._choice]) == _LAST and not self._expected:
            self._expected = usual
        has_changed = 0.0 < _SLOWER * self._expected < usual
        if has_changed:
            self._expected = usual
        is_doubtful = self._choice == _CONTENDED or waited > _SUSPICIOUS * seconds
        self._tries = has_changed or (is_doubtful and self._since_try >= _PATIENCE[self._choice])


def _median(values: Sequence[float]) -> float:  # importing the standard library's module imports many others
    return sorted(values)[len(values) // 2]
