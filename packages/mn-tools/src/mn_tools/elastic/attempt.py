"""The state of one attempt to run a job, as its ranks have reported it through the keepers of their nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Attempt"]


@dataclass
class Attempt:
    """The state of one attempt.

    Attributes:
        number: Its number, from 1.
        size: The number of ranks; 0 until one has reported it.
        present: The ranks that are connected, and the host of each.
        joined: The ranks that are or were connected.
        finished: The ranks that have reached the end of the script, and so the end of the training.
        is_elastic: Whether a rank that has finished reports for all ranks, because the others were lost.
        failures: The failures of ranks: the rank, its status, and the reason in one line.
        has_ended: Whether ranks have reported that none continues. Ranks that are stopped may still be present.
        newest: The largest number under which a state was saved; -1 if there is none.
    """

    number: int
    size: int = 0
    present: dict[int, str] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    is_elastic: bool = False
    failures: list[tuple[int, int, str]] = field(default_factory=list)
    has_ended: bool = False
    newest: int = -1

    def hear(self, message: dict[str, Any], host: str) -> None:
        """Process a message from the keeper of a host."""
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
        elif message["op"] == "over":
            self.has_ended = True
        elif message["op"] == "failed":
            self.failures.append((rank, message["status"], message["summary"]))

    @property
    def is_finished(self) -> bool:
        """Whether the training has been completed."""
        return bool(self.finished) and (self.is_elastic or len(self.finished) == self.size)

    @property
    def is_over(self) -> bool:
        """Whether there were ranks, and none of them continues."""
        return self.has_ended or (bool(self.joined) and not self.present)

    @property
    def status(self) -> int:
        """The exit status of a job whose last attempt this was."""
        return 0 if self.is_finished else max((status for _, status, _ in self.failures), default=1) or 1

    @property
    def reason(self) -> str:
        """Why the attempt has failed, as far as ranks have reported it."""
        if not self.joined:
            return "no rank has made a communicator"
        if self.failures:
            rank, _, summary = self.failures[0]
            return f"rank {rank}: {summary}"
        return f"ranks ended without a message: {len(self.finished)} of {self.size} have reached the end of the script"
