"""The stall monitor: if a rank has waited too long, every rank prints what it is doing.

After a mistake in a program with several ranks, often nothing happens: all ranks wait for each other, or for a message
that is never sent. The thread of each process (:mod:`mn_guard.guard_thread`) monitors
:data:`mn_comm.ranks.watch.activities`. Once a rank has waited for others for longer than ``CHAINERMN_STALL_SECONDS``
(default 60; 0 switches the monitor off) it writes to stderr what it is waiting for and where, and asks its neighbor to
do the same (:mod:`mn_guard.stall_probe`). A rank that does not answer, or has reached the end of its program, is
reported. The job then ends if ``CHAINERMN_STALL_ABORT=1``, or if a rank waits for several ranks one of which has ended;
but an elastic rank first tries to continue without that one. With ``CHAINERMN_STALL_STACKS=1``, the stacks are written
as well.

While nothing stalls, the thread wakes up to look for questions at most ten times within the limit.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator

from mn_comm.basis.mpi import MPI
from mn_comm.ranks.watch import Activity, Call, activities, explanations, polled
from mn_guard import exit_status, guard_thread
from mn_guard.abort import abort_when_read, say
from mn_guard.exit_sequence import Step, at_exit
from mn_guard.job import as_number
from mn_guard.stall_probe import StallProbe, in_world
from mn_guard.stall_report import bind, describe, ranks_of

# No rank can complete these before all have called them: MPI calls, and operations of this package. A split is none of
# them: then the ranks of a part wait only for one another, and those of another part may have ended.
_FOR_ALL = {
    *("Barrier", "Dup", "Split", "Allreduce", "Iallreduce", "Allgather", "Allgatherv", "Alltoallv"),
    *("Reduce_scatter", "Reduce_scatter_block", "allreduce", "allgather", "alltoall"),
    *("barrier", "allreduce_obj", "allgather_obj", "reduce_scatter", "multi_node_mean_grad"),
}
_WITH_PARTNER = {"send", "recv", "send_obj", "recv_obj"}
_WHY_SILENT = "it is stopped, dead or overloaded, or in C code that keeps the GIL"
_SLOWEST_POLL = 1.0


class Monitor:
    """Monitors the waiting of one process.

    Args:
        limit: Seconds after which a wait counts as stalled, above 0.
        abort: Whether the job then ends.
        stacks: Whether stacks are written as well.
        write: Prints a message; called in the monitor's thread.
        end: Ends the job, or this rank; its argument is the reason.

    Attributes:
        due: When to poll next, as :func:`time.monotonic` counts.
        probe: The messages to and from other ranks' monitors.
    """

    def __init__(
        self,
        limit: float,
        *,
        abort: bool,
        stacks: bool = False,
        write: Callable[[str], object] = say,
        end: Callable[[str], object] | None = None,
    ) -> None:
        self.limit = limit
        self.abort = abort
        self.due = 0.0
        self.interval = min(limit / 10, _SLOWEST_POLL)
        self._stacks = stacks
        self._write = write
        self._end = end or _end_job
        self._time_to_speak = 3 * self.interval + 0.5  # after this time, all ranks have checked for questions
        self.probe = StallProbe(self._time_to_speak)
        self._reported: dict[int, float] = {}  # when each wait was reported, by its start
        self._said: object = None
        self._interrupted: set[int] = set()  # the starts of waits
        self._lock = threading.RLock()  # what interrupts waits also leaves communicators

    def join(self, ranks: MPI.Intracomm) -> None:
        """From now on, answer questions on a private communicator."""
        with self._lock:
            if ranks not in self.probe.joined:
                self.probe.joined.append(ranks)

    def leave(self, ranks: MPI.Intracomm) -> None:
        """Stop answering on a communicator, which is about to be freed."""
        with self._lock:
            self.probe.joined = [other for other in self.probe.joined if other != ranks]

    def poll(self) -> None:
        """Check once for waits that have stalled, and for questions of other ranks."""
        with self._lock:
            for reference in polled:
                look = reference()
                if look is not None:
                    look()
            stalled = self._stalled()
            for activity, since in stalled:
                if since not in self._reported:
                    self._reported[since] = time.monotonic()
                    self._say("")
                    self._ask_neighbor(activity)
            self.probe.answer(self._tell)
            for rank in self.probe.silent():
                if rank not in self.probe.finished:
                    self._write(f"[chainermn] rank {rank} does not answer: {_WHY_SILENT}\n")
            hopeless = {since: why for activity, since in stalled if (why := self._why_hopeless(activity, since))}
            if hopeless:
                self._give_up(hopeless)

    def attend(self, signals: bytes) -> None:
        """Poll if it is time."""
        now = time.monotonic()
        if now >= self.due:
            self.due = now + self.interval  # a program that forks repeatedly restarts the thread each time
            self.poll()

    def _stalled(self) -> list[tuple[Activity, int]]:
        """Return the activities that have waited too long, each with the start of its wait."""
        now = time.monotonic_ns()
        waits = [(activity, activity.wait) for activity in list(activities.values())]
        return [(activity, wait[2]) for activity, wait in waits if wait and now - wait[2] > self.limit * 1e9]

    def _why_hopeless(self, activity: Activity, since: int) -> str:
        """Return why the job must end, if a wait was reported so long ago that all ranks have answered."""
        needed, status, wait = _needed(activity), exit_status.asked_for(), activity.wait
        if wait is None or wait[2] != since:
            return ""  # it has ended: what was found may be about the next one
        long_ago = time.monotonic() - self._time_to_speak
        if self._reported[since] > long_ago:
            return ""
        # A rank that has just ended may have sent what this one waits for.
        ended = self.probe.finished | self.probe.leaving
        gone = {rank for rank, when in ended.items() if when <= long_ago} & needed
        if gone:
            return f"rank {min(gone)} has reached the end of its program, but this rank still waits for it"
        if status:
            return f"this rank has asked for exit status {status}, but still waits"
        return "CHAINERMN_STALL_ABORT is set" if self.abort else ""

    def _give_up(self, hopeless: dict[int, str]) -> None:
        """Interrupt waits, given by their starts and the reasons, once; end the job if they cannot be interrupted."""
        place, why = f"[chainermn] rank {MPI.COMM_WORLD.rank}", min(hopeless.values())
        if _interrupt is not None and not self.abort and hopeless.keys() - self._interrupted:
            self._interrupted |= hopeless.keys()
            self._write(f"{place} no longer waits: {why}\n")
            _interrupt()
        else:
            self._write(f"{place} ends the job: {why}\n")
            self._end(why)

    def _ask_neighbor(self, activity: Activity) -> None:
        calls, wait = list(activity.calls), activity.wait
        for call in calls:
            self.probe.ask(ranks_of(call))
        if not calls and wait is not None:
            self.probe.ask(wait[1])

    def _tell(self, asking: int) -> bool:
        """Print what this rank is doing, when another rank asks; return whether the next rank must be asked."""
        if self._stalled():  # this rank asks by itself
            return False
        self._say(f", asked by rank {asking},")
        return True

    def _say(self, occasion: str) -> None:
        """Print what this rank is doing, unless it has printed the same before."""
        doing = list(activities.values())
        said = [(activity.wait, activity.count) for activity in doing]
        if said == self._said:
            return
        self._said = said
        lines = describe(doing, occasion, list(_notes()), stacks=self._stacks)
        self._write("".join(f"[chainermn] {line}\n" for line in lines))


def _notes() -> Iterator[str]:
    for explanation in explanations:
        try:
            yield from explanation()
        except Exception as error:  # the report must not be lost
            yield f"a function passed to explain_stalls raised {type(error).__name__}: {error}"


def _end_job(why: str) -> None:
    """End the job; but only this rank, if it is elastic and is to end with a status."""
    status, end_alone = exit_status.asked_for(), exit_status.other_end()
    if status and end_alone is not None:
        end_alone(why, status)
    abort_when_read(status or 1, why)


def _needed(activity: Activity) -> set[int]:
    """Return the ranks, numbered as in ``MPI_COMM_WORLD``, for all of which an activity waits."""
    calls, wait = list(activity.calls), activity.wait  # which may end at any moment
    waits = [(wait[0], wait[1])] if wait is not None else []
    waits += [(call.function.__name__, ranks_of(call)) for call in calls]
    needed = {rank for name, ranks in waits if name in _FOR_ALL and ranks is not None for rank in in_world(ranks)}
    # Only in the main thread: the program does not wait for other threads, which may wait until it ends.
    if calls and activity.thread == threading.main_thread().ident:
        needed |= _partner(calls[-1])
    return needed


def _partner(call: Call) -> set[int]:
    """Return the rank that a call sends to or receives from; empty if the call does neither, or names no rank."""
    ranks = ranks_of(call)
    if ranks is None or call.function.__name__ not in _WITH_PARTNER:
        return set()
    bound = bind(call).arguments
    partner = bound.get("source", bound.get("dest", MPI.ANY_SOURCE))
    return {in_world(ranks)[partner]} if partner != MPI.ANY_SOURCE else set()


_interrupt: Callable[[], object] | None = None


def start() -> None:
    """Start the monitor, unless it runs, or ``CHAINERMN_STALL_SECONDS`` is 0.

    Raises:
        ValueError: ``CHAINERMN_STALL_SECONDS`` is not a number of seconds.
    """
    limit, thread = _limit(), guard_thread.thread
    if limit and thread.find(Monitor) is None:
        monitor = Monitor(limit, abort=_is_set("CHAINERMN_STALL_ABORT"), stacks=_is_set("CHAINERMN_STALL_STACKS"))
        thread.add(monitor)
        # The thread must not be inside MPI when MPI is finalised. This happens later; or earlier, if the script
        # finalises MPI, which first frees the attributes of this communicator.
        at_exit(Step.FAREWELL, functools.partial(_end, monitor))
        # In a forked child, too, where the thread is not this process's: the child also finalises MPI.
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: thread.end()), True)


def join(ranks: MPI.Intracomm) -> None:
    """Watch over a new communicator.

    Args:
        ranks: Its private duplicate.
    """
    start()
    if (monitor := guard_thread.thread.find(Monitor)) is not None:
        monitor.join(ranks)


def _end(monitor: Monitor) -> None:
    guard_thread.thread.end()
    monitor.probe.say_farewell()


def leave(ranks: MPI.Intracomm) -> None:
    """Stop watching over a communicator, before it is freed."""
    if (monitor := guard_thread.thread.find(Monitor)) is not None:
        monitor.leave(ranks)


def finish() -> None:
    """Tell ranks that ask from now on that this rank has reached the end of its program, although it still waits."""
    if (monitor := guard_thread.thread.find(Monitor)) is not None:
        monitor.probe.is_leaving = True


def interrupt_by(interrupt: Callable[[], object]) -> None:
    """Replace the first effect of waiting for a rank that has ended, which is to end all ranks.

    Args:
        interrupt: Called in the monitor's thread; makes operations fail that wait for other ranks.
    """
    global _interrupt
    _interrupt = interrupt


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def _limit() -> float:
    text = os.environ.get("CHAINERMN_STALL_SECONDS", "60")
    limit = as_number(text)
    if not 0 <= limit < float("inf"):
        raise ValueError(f"expected a number of seconds, 0 or more, in CHAINERMN_STALL_SECONDS, got {text!r}")
    return limit
