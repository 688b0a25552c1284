"""How long saving took."""

from __future__ import annotations

import time


class CheckpointStats:
    """The times between calls of :meth:`start` and :meth:`end`.

    Attributes:
        timings: For each, ``"b"`` is when it began, in seconds since the epoch, and ``"d"`` is how long it took, in
            seconds.
        begin: When the current one began; ``None`` if there is none.
    """

    def __init__(self) -> None:
        self.timings: list[dict[str, float]] = []
        self.begin: float | None = None
        self._started = 0.0  # from a clock that is never adjusted

    def start(self) -> None:
        """Begin; an earlier beginning without an end is discarded."""
        self.begin = time.time()
        self._started = time.monotonic()

    def end(self) -> None:
        """Record the time since :meth:`start`; without one, do nothing."""
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
