"""What is known of one attempt to run a job: what its ranks have said, through the keepers of their nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Attempt"]


@dataclass
class Attempt:
    """What is known of one attempt.

    Attributes:
        number: Which one it is, from 1.
        size: How many ranks there are; 0 until one has said so.
        present: The ranks that are there, and on which host each is.
        joined: The ranks that are or were there.
        finished: The ranks that have come to the end of the script, and whose end is that of the training.
        is_elastic: Whether one of these stands for all: the others were lost.
        failures: What ranks have failed of: the rank, its status, and why in a line.
        newest: The largest number under which something was kept; -1 if there is none.
    """

    number: int
    size: int = 0
    present: dict[int, str] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    is_elastic: bool = False
    failures: list[tuple[int, int, str]] = field(default_factory=list)
    newest: int = -1

    def hear(self, message: dict[str, Any], host: str) -> None:
        """Take note of what the keeper of a host has passed on."""
        if message["op"] == "kept":
            self.newest = max(self.newest, message["number"])
        if message.get("attempt") != self.number:
            return
        rank = message["rank"]
        if message["op"] == "join":
            self.size = message["size"]
            self.present[rank] = host
            self.joined.add(rank)
        elif message["op"] == "gone":
            self.present.pop(rank, None)
        elif message["op"] == "finished":
            self.finished.add(rank)
            self.is_elastic |= message["elastic"]
        elif message["op"] == "failed":
            self.failures.append((rank, message["status"], message["summary"]))

    @property
    def is_finished(self) -> bool:
        """Whether the training has come to its end."""
        return bool(self.finished) and (self.is_elastic or len(self.finished) == self.size)

    @property
    def is_over(self) -> bool:
        """Whether there were ranks, and none is left."""
        return bool(self.joined) and not self.present

    @property
    def status(self) -> int:
        """What a job ends with whose last attempt this was."""
        return 0 if self.is_finished else max((status for _, status, _ in self.failures), default=1) or 1

    @property
    def reason(self) -> str:
        """Why it has failed, as far as ranks have said."""
        if not self.joined:
            return "no rank has made a communicator"
        if self.failures:
            rank, _, summary = self.failures[0]
            return f"rank {rank}: {summary}"
        return f"ranks ended without a message: {len(self.finished)} of {self.size} have come to the end of the script"
