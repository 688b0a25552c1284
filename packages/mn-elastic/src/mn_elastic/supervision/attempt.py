"""The state of one attempt to run a job, as its ranks have reported it through the keepers of their nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Attempt:
    """The state of one attempt.

    Attributes:
        number: Its number, from 1.
        expected: The number of processes that were started.
        size: The number of ranks; 0 until one has reported it.
        present: The ranks that are connected, and the host of each.
        joined: The ranks that have made a communicator.
        early: The ranks that have ended before they had made a communicator, in this order.
        verdict: Why the supervisor has ended the attempt; empty if it had no reason of its own.
        finished: The ranks that have reached the end of the script, and so the end of the training.
        is_elastic: Whether a rank that has finished reports for all ranks, because the others were lost.
        failures: The failures of ranks: the rank, its status, and the reason in one line.
        has_ended: Whether ranks have reported that none continues. Ranks that are stopped may still be present.
        newest: The largest number under which a state was saved, also in earlier attempts; -1 if there is none.
        launched: The status with which the launcher has ended by itself; 0 if it was ended.
        early_since: When a rank ended before its first communicator, in seconds since the start of the attempt.
        lost: The lost hosts, each with the reason.
        silent: The hosts that have become silent.
        has_said_late: Whether it was said that ranks have not come together for a long time.
    """

    number: int
    expected: int = 0
    size: int = 0
    present: dict[int, str] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    early: list[int] = field(default_factory=list)
    verdict: str = ""
    finished: set[int] = field(default_factory=set)
    is_elastic: bool = False
    failures: list[tuple[int, int, str]] = field(default_factory=list)
    has_ended: bool = False
    newest: int = -1
    launched: int = 0
    early_since: float | None = None
    lost: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    has_said_late: bool = False

    def hear(self, message: dict[str, Any], host: str) -> None:
        """Process a message from the keeper of a host."""
        if message["op"] == "kept":
            self.newest = max(self.newest, message["number"])
        if message.get("attempt") != self.number:
            return
        rank = message["rank"]
        if message["op"] in ("start", "join"):
            self._hear_of_start(message, host)
        elif message["op"] == "gone":
            self._hear_of_end(rank)
        elif message["op"] == "finished":
            self.finished.add(rank)
            self.is_elastic |= message["elastic"]
        elif message["op"] == "over":
            self.has_ended = True
        elif message["op"] == "failed":
            self.failures.append((rank, message["status"], message["summary"]))

    def _hear_of_start(self, message: dict[str, Any], host: str) -> None:
        self.present[message["rank"]] = host
        if message["op"] == "join":
            self.size = message["size"]
            self.joined.add(message["rank"])

    def _hear_of_end(self, rank: int) -> None:
        self.present.pop(rank, None)
        if rank not in self.joined:
            self.early.append(rank)

    @property
    def is_together(self) -> bool:
        """Whether all ranks have made a communicator."""
        return bool(self.joined) and len(self.joined) >= self.size

    @property
    def problem_at_start(self) -> str:
        """Why ranks that are present would wait forever; empty if no rank has ended too early."""
        if not self.early or not self.present:
            return ""
        return f"rank {self.early[0]} has ended before it had made a communicator"

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
        if self.is_finished:
            return 0
        # Without a communicator, no rank can report its own.
        statuses = [status for _, status, _ in self.failures] or [0 if self.joined else self.launched]
        return max(statuses) or 1

    @property
    def reason(self) -> str:
        """Why the attempt has failed, as far as it is known."""
        if self.verdict:
            return self.verdict
        if not self.joined:
            return "no rank has made a communicator"
        if self.failures:
            rank, _, summary = self.failures[0]
            return f"rank {rank}: {summary}"
        return f"ranks ended without a message: {len(self.finished)} of {self.size} have reached the end of the script"
