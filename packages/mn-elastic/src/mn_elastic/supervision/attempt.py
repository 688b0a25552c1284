"""The state of one attempt to run a job, as its processes have reported it through the keepers of their nodes.

A rank is a process that the launcher has started. Processes that it starts have its environment, and report, too. As
long as it has no communicator of its own, they stand for it, because a script may start the training. But then it is
the launcher's status that says how the script has ended.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from mn_guard.job import BY_SIGNAL

_SIGNALS = [getattr(signal, f"SIG{name}") for name in "ILL ABRT BUS FPE KILL SEGV PIPE TERM".split()]


@dataclass
class Attempt:
    """The state of one attempt.

    Attributes:
        number: Its number, from 1.
        expected: The number of ranks, with spares.
        started: The processes that the launcher has started, by the names from their keepers, and their ranks.
        present: The processes that are connected, and their hosts.
        hosts: The hosts from which processes have reported.
        joined: The ranks that have made a communicator, and the processes that have.
        elsewhere: The processes with a communicator that are in another job, which a rank has started, and whether they
            have reached the end of their script. They are the training if no rank has joined.
        early: The ranks that have ended before they had made a communicator, in this order.
        verdict: Why the supervisor has ended the attempt; empty if it had no reason of its own.
        finished: The ranks that have reached the end of the script, and so the end of the training. Of each, the
            process, and whether it reports for all ranks, because the others were lost.
        failures: The failures of ranks: the rank, its status, and the reason in one line.
        has_ended: Whether ranks have reported that none continues. Ranks that are stopped may still be present.
        newest: The largest number under which a state was saved, also in earlier attempts; -1 if there is none.
        launched: The status with which the launcher has ended by itself; ``None`` if it has not ended, or was ended.
        early_since: When a rank ended before its first communicator, in seconds since the start of the attempt.
        lost: The lost hosts, each with the reason.
        silent: The hosts that have become silent.
        has_said_late: Whether it was said that ranks have not come together for a long time.
        has_said_ending: Whether it was said that ranks, or the launcher, take long to end after the end of the script.
    """

    number: int
    expected: int = 0
    started: dict[str, int] = field(default_factory=dict)
    present: dict[str, str] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)
    joined: dict[int, str] = field(default_factory=dict)
    elsewhere: dict[str, bool] = field(default_factory=dict)
    early: list[int] = field(default_factory=list)
    verdict: str = ""
    finished: dict[int, tuple[str, bool]] = field(default_factory=dict)
    failures: list[tuple[int, int, str]] = field(default_factory=list)
    has_ended: bool = False
    newest: int = -1
    launched: int | None = None
    early_since: float | None = None
    lost: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    has_said_late: bool = False
    has_said_ending: bool = False

    def hear(self, message: dict[str, Any], host: str) -> None:
        """Process a message from the keeper of a host."""
        if message["op"] == "kept":
            self.newest = max(self.newest, message["number"])
        if message.get("attempt") != self.number:
            return
        rank, process = message["rank"], message["process"]
        self.hosts.add(host)
        if message["op"] == "start":
            self.started[process] = rank
            self.present[process] = host
        elif message["op"] == "join":
            self._hear_of_communicator(process, host, rank, message["size"])
        elif process in self.present:
            self._hear_from(process, rank, message)

    def may_need(self, host: str) -> bool:
        """Return whether ranks were, or may still come to be, on a host that has a keeper."""
        return host in self.hosts or not self.is_together

    def forget(self, host: str) -> None:
        """Note that nothing more will be heard of the processes of a host."""
        self.present = {process: where for process, where in self.present.items() if where != host}

    def _hear_of_communicator(self, process: str, host: str, rank: int, size: int) -> None:
        maker = self.joined.get(rank)
        if process in self.started or not self.started:
            self.finished.pop(rank, None)  # what has ended before was not the training
            if size != self.expected:
                # In MPI_Init, a process that finds no launcher, or that of another library, becomes rank 0 of 1.
                found = f"expected ranks of a job of size {self.expected}, got rank {rank} of {size}"
                self.verdict = f"{found}: mpiexec has ended, or belongs to another MPI library than mpi4py uses"
        elif maker in self.started and maker in self.present:
            return  # it is not needed
        elif size != self.expected:
            self.elsewhere[process] = False
        if process not in self.elsewhere:
            self.joined[rank] = process
        self.present[process] = host

    def _hear_from(self, process: str, rank: int, message: dict[str, Any]) -> None:
        if message["op"] == "gone":
            del self.present[process]
            if process in self.started and rank not in self.joined:
                self.early.append(rank)
        elif message["op"] == "finished" and process in self.elsewhere:
            self.elsewhere[process] = True
        elif message["op"] == "finished":
            if process in self.started or self.joined.get(rank) not in self.started:
                self.finished[rank] = process, message["elastic"]
        elif message["op"] == "over":
            self.has_ended = True
        elif message["op"] == "failed":
            self.failures.append((rank, message["status"], message["summary"]))

    def _is_child(self, process: str) -> bool:
        """Return whether a process was started by a rank, and not by the launcher."""
        return bool(self.started) and process not in self.started

    @property
    def trains_in_children(self) -> bool:
        """Whether ranks have processes that train in their place, and do not know how the ranks end."""
        return any(map(self._is_child, self.joined.values())) or self._is_elsewhere

    @property
    def _is_elsewhere(self) -> bool:
        return bool(self.elsewhere) and not self.joined

    @property
    def is_together(self) -> bool:
        """Whether all ranks have made a communicator."""
        return self._is_elsewhere or (bool(self.joined) and len(self.joined) >= self.expected)

    @property
    def problem_at_start(self) -> str:
        """Why ranks that are present would wait forever; empty if no rank has ended too early."""
        early = [rank for rank in self.early if rank not in self.joined]
        return f"rank {early[0]} has ended before it had made a communicator" if early and self.present else ""

    @property
    def is_finished(self) -> bool:
        """Whether the training has been completed."""
        if self.verdict:
            return False
        if self.is_whole:
            return not self._contradicts
        return any(is_elastic for _, is_elastic in self.finished.values())

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have reached the end of the script: none was lost."""
        if self._is_elsewhere:
            return any(self.elsewhere.values())
        return bool(self.finished) and len(self.finished) == self.expected

    @property
    def _contradicts(self) -> bool:
        """Whether the launcher's status says that a rank has failed after it had reached the end of its script.

        It is that of ``sys.exit(main())``, of which nothing is known here if ``main`` has made the first communicator.
        A status that stands for a signal may come from the end of MPI. MPICH's is the number of the signal.
        """
        if self.launched is None:
            return self.trains_in_children and bool(self.failures)
        may_be_signal = self.launched >= BY_SIGNAL or self.launched in _SIGNALS
        return self.launched > 0 and (self.trains_in_children or not may_be_signal)

    @property
    def n_exiting(self) -> int:
        """How many of the processes that have reached the end of their scripts have not ended yet."""
        return sum(process in self.present for process, _ in self.finished.values())

    @property
    def continues(self) -> bool:
        """Whether ranks have other processes train, and continue after that."""
        scripts = [each for each, rank in self.started.items() if rank in self.finished or self._is_elsewhere]
        return self.trains_in_children and any(process in self.present for process in scripts)

    @property
    def is_over(self) -> bool:
        """Whether there were ranks, and none of them continues."""
        return self.has_ended or (bool(self.started or self.joined) and not self.present)

    @property
    def status(self) -> int:
        """The exit status of a job whose last attempt this was."""
        if self.is_finished:
            return 0
        # Without a communicator, no rank can report its own.
        counts = self.is_whole or self.trains_in_children or not self.joined
        launched = self.launched if counts and self.launched else 0
        status = max(status for _, status, _ in self.failures) if self.failures else launched
        return status & 0xFF or 1  # the rest gets lost when this process ends with it

    @property
    def reason(self) -> str:
        """Why the attempt has failed, as far as it is known."""
        if self.verdict:
            return self.verdict
        if not self.joined and not self.elsewhere:
            return "no rank has made a communicator"
        if self.failures:
            rank, _, summary = self.failures[0]
            return f"rank {rank}: {summary}"
        if self.is_whole:
            return f"ranks have reached the end of the script, but mpiexec has ended with status {self.launched}"
        return (
            f"ranks ended without a message: {len(self.finished)} of {self.expected} have reached the end of the script"
        )
