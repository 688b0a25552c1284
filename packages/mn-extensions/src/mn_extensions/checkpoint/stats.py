"""How long saving took."""

from __future__ import annotations

import time

__all__ = ["CheckpointStats"]


class CheckpointStats:
    """Durations of what lies between :meth:`start` and :meth:`end`.

    Attributes:
        timings: For each, when it began, under ``"b"``, in seconds since the epoch, and how long it took, under
            ``"d"``, in seconds.
        begin: When that which is under way began; ``None`` if nothing is.
    """

    def __init__(self) -> None:
        self.timings: list[dict[str, float]] = []
        self.begin: float | None = None
        self._started = 0.0  # by a clock that nobody sets

    def start(self) -> None:
        """Begin; what was begun before and has not ended is forgotten."""
        self.begin = time.time()
        self._started = time.monotonic()

    def end(self) -> None:
        """Note how long it took since :meth:`start`; without one, do nothing."""
        if self.begin is not None:
            self.timings.append({"b": self.begin, "d": time.monotonic() - self._started})
            self.begin = None

    def report(self) -> str:
        """Return the mean, the shortest and the longest time in seconds, as text."""
        seconds = [timing["d"] for timing in self.timings]
        if not seconds:
            return "nothing was saved yet"
        mean = sum(seconds) / len(seconds)
        return (
            f"{len(seconds)} checkpoints saved, seconds for each: mean {mean:f}, min {min(seconds):f}, "
            f"max {max(seconds):f}"
        )
