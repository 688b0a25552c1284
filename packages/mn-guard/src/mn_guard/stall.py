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

import contextlib
import functools
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from mn_comm.basis.mpi import MPI
from mn_comm.ranks.watch import Activity, Call, activities, explanations, polled
from mn_guard import guard_thread
from mn_guard.abort import abort_when_read, say
from mn_guard.crash_output import folders_of_libraries
from mn_guard.exit_sequence import Step, at_exit
from mn_guard.forks import around_forks
from mn_guard.stall_probe import StallProbe

__all__ = ["Monitor", "finish", "interrupt_by", "join", "leave"]

# No rank can complete these before all have called them: MPI calls, and operations of this package.
_FOR_ALL = {
    *("Barrier", "Dup", "Split", "Allreduce", "Iallreduce", "Allgather", "Allgatherv", "Alltoallv"),
    *("Reduce_scatter", "Reduce_scatter_block", "allreduce", "allgather", "alltoall"),
    *("barrier", "split", "allreduce_obj", "allgather_obj", "reduce_scatter", "multi_node_mean_grad"),
}
_WITH_PARTNER = {"send", "recv", "send_obj", "recv_obj"}
_WHY_SILENT = "it is stopped, dead or overloaded, or in C code that keeps the GIL"
_SLOWEST_POLL = 1.0


def _end_job(why: str) -> None:
    abort_when_read(summary=why)


class Monitor:
    """Monitors the waiting of one process.

    Args:
        limit: Seconds after which a wait counts as stalled, above 0.
        abort: Whether the job then ends.
        stacks: Whether stacks are written as well.
        write: Prints a message; called in the monitor's thread.
        end: Ends the job; its argument is the reason.

    Attributes:
        due: When to poll next, as :func:`time.monotonic` counts.
    """

    def __init__(
        self,
        limit: float,
        *,
        abort: bool,
        stacks: bool = False,
        write: Callable[[str], object] = say,
        end: Callable[[str], object] = _end_job,
    ) -> None:
        self.limit = limit
        self.abort = abort
        self.due = 0.0
        self.interval = min(limit / 10, _SLOWEST_POLL)
        self._stacks = stacks
        self._write = write
        self._end = end
        self._probe = StallProbe(self._time_to_speak)
        self._reported: dict[int, tuple[int, float]] = {}
        self._said: object = None
        self._interrupted: set[int] = set()  # the starts of waits
        self._lock = threading.RLock()  # what interrupts waits also leaves communicators

    def join(self, ranks: MPI.Intracomm) -> None:
        """From now on, answer questions on a private communicator."""
        with self._lock:
            if not any(ranks == other for other in self._probe.joined):
                self._probe.joined.append(ranks)

    def leave(self, ranks: MPI.Intracomm) -> None:
        """Stop answering on a communicator, which is about to be freed."""
        with self._lock:
            self._probe.joined = [other for other in self._probe.joined if other != ranks]

    def poll(self) -> None:
        """Check once for waits that have stalled, and for questions of other ranks."""
        with self._lock:
            for reference in polled:
                look = reference()
                if look is not None:
                    look()
            stalled = self._stalled()
            for activity, since in stalled:
                if self._reported.get(activity.thread, (0, 0.0))[0] != since:
                    self._reported[activity.thread] = (since, time.monotonic())
                    self._say("")
                    self._ask_neighbor(activity)
            self._probe.answer(self._tell)
            for rank in self._probe.silent():
                if rank not in self._probe.finished:
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

    @property
    def _time_to_speak(self) -> float:
        """The number of seconds after which all ranks have checked for questions."""
        return 3 * self.interval + 0.5

    def _why_hopeless(self, activity: Activity, since: int) -> str:
        """Return why the job must end, if a wait was reported so long ago that all ranks have answered."""
        reported_for, reported_at = self._reported.get(activity.thread, (0, 0.0))
        if reported_for != since or time.monotonic() - reported_at < self._time_to_speak:
            return ""
        for needed in _needed(activity):
            gone = (self._probe.finished.keys() | self._probe.leaving) & needed
            if gone:
                return f"rank {min(gone)} has reached the end of its program, but this rank still waits for it"
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
        for call in activity.calls:
            self._probe.ask(_ranks_of(call))
        if not activity.calls and activity.wait is not None:
            self._probe.ask(activity.wait[1])

    def _tell(self, asking: int) -> bool:
        """Print what this rank is doing, when another rank asks; return whether the next rank must be asked."""
        if self._stalled():  # this rank asks by itself
            return False
        self._say(f", asked by rank {asking},")
        return True

    def finish(self) -> None:
        """From now on, answer that this rank has reached the end of its program."""
        self._probe.is_leaving = True

    def say_farewell(self) -> None:
        """Tell the other ranks that this process does not take part in anything any more."""
        with contextlib.suppress(MPI.Exception):
            self._probe.say_farewell()

    def _say(self, occasion: str) -> None:
        """Print what this rank is doing, unless it has printed the same before."""
        doing = list(activities.values())
        said = [(activity.wait, activity.count) for activity in doing]
        if said == self._said:
            return
        self._said = said
        world = MPI.COMM_WORLD
        place = f"rank {world.rank} of {world.size} ({MPI.Get_processor_name()}){occasion}"
        waiting = [activity for activity in doing if activity.wait is not None]
        lines = [f"{place} {_describe_wait(activity)}" for activity in waiting] or [f"{place} {_describe_idle()}"]
        for activity in waiting:
            lines += _other_messages(activity)
        for explanation in explanations:
            lines += [f"  {line}" for line in explanation()]
        if self._stacks:
            for activity in waiting:
                lines += ["  its stack:", *_stack(activity.thread)]
        self._write("".join(f"[chainermn] {line}\n" for line in lines))


def _needed(activity: Activity) -> list[set[int]]:
    """Return groups of ranks, numbered as in ``MPI_COMM_WORLD``; an activity waits for all ranks of each group."""
    waits = [(activity.wait[0], activity.wait[1])] if activity.wait is not None else []
    waits += [(call.function.__name__, _ranks_of(call)) for call in activity.calls]
    groups = [set(_in_world(ranks)) for name, ranks in waits if name in _FOR_ALL and ranks is not None]
    # Only in the main thread: the program does not wait for other threads, which may wait until it ends.
    if activity.calls and activity.thread == threading.main_thread().ident:
        groups.append(_partner(activity.calls[-1]))
    return groups


def _partner(call: Call) -> set[int]:
    """Return the rank that a call sends to or receives from; empty if the call does neither, or names no rank."""
    ranks = _ranks_of(call)
    if ranks is None or call.function.__name__ not in _WITH_PARTNER:
        return set()
    bound = inspect.signature(call.function).bind(*call.arguments, **call.keywords).arguments
    partner = bound.get("source", bound.get("dest", MPI.ANY_SOURCE))
    return {_in_world(ranks)[partner]} if partner != MPI.ANY_SOURCE else set()


def _in_world(ranks: MPI.Intracomm) -> list[int]:
    return ranks.group.Translate_ranks(None, MPI.COMM_WORLD.group)


def _ranks_of(call: Call) -> MPI.Intracomm | None:
    """Return the ranks of the communicator to which an operation belongs."""
    return getattr(call.arguments[0] if call.arguments else None, "ranks", None)


def _describe_wait(activity: Activity) -> str:
    assert activity.wait is not None
    what, ranks, since = activity.wait
    calls = list(activity.calls)
    purpose = f" for {activity.purpose()}" if activity.purpose else ""
    seconds = f"has waited for {(time.monotonic_ns() - since) / 1e9:.1f} s"
    if not calls:
        return f"{seconds} in {what}{purpose}, {_place(activity.thread)}"
    group = _ranks_of(calls[-1]) or ranks
    group_of = (
        f" as rank {group.rank} of {group.size}" if group is not None and group.size != MPI.COMM_WORLD.size else ""
    )
    return f"{seconds} in {_describe_call(calls[0])}{group_of}{purpose}, {_place(activity.thread)}"


def _describe_idle() -> str:
    main = threading.main_thread().ident or 0
    finished = activities[main].finished if main in activities else ()
    return f"is not waiting for other ranks; {_place(main)}; it finished last: {', '.join(finished) or 'nothing'}"


def _describe_call(call: Call) -> str:
    bound = inspect.signature(call.function).bind(*call.arguments, **call.keywords)
    bound.apply_defaults()
    shown = {name: value for name, value in bound.arguments.items() if name != "self"}
    return f"{call.function.__name__}({', '.join(f'{name}={_describe(value)}' for name, value in shown.items())})"


def _place(thread: int) -> str:
    """Return the script's line that a thread is executing: for a worker, that of the main thread."""
    frames = _frames(thread)
    if not any(map(_is_script, frames)):
        frames = _frames(threading.main_thread().ident or 0)
    found = [frame for frame in frames if _is_script(frame)] or frames
    if not found:
        return "at an unknown place"
    frame = found[-1]
    line = f": {frame.line}" if frame.line else ""  # python -c has no file
    return f"at {frame.filename}:{frame.lineno} in {frame.name}{line}"


def _frames(thread: int) -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the documented way to another thread's stack
    return list(traceback.extract_stack(frame)) if frame is not None else []


def _is_script(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame belongs neither to these packages nor to Python's library."""
    is_library = os.path.dirname(frame.filename) == os.path.dirname(threading.__file__)
    return not is_library and not frame.filename.startswith(("<frozen", *folders_of_libraries()))


def _other_messages(activity: Activity) -> list[str]:
    """Describe messages that have arrived with a different tag than the one that a ``recv`` waits for."""
    call = activity.calls[-1] if activity.calls else None
    if call is None or call.function.__name__ != "recv" or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return []
    bound = inspect.signature(call.function).bind(*call.arguments, **call.keywords)
    status = MPI.Status()
    if not call.arguments[0].mpi_comm.Iprobe(bound.arguments["source"], MPI.ANY_TAG, status):
        return []
    return [f"  a message from rank {status.source} has arrived, but no receive waits for its tag {status.tag}"]


def _stack(thread: int) -> list[str]:
    return [f"    {entry.filename}:{entry.lineno} in {entry.name}: {entry.line}" for entry in _frames(thread)]


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"<{value.dtype} array of shape {value.shape}>"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_describe, value[:4]))}{', ...' if len(value) > 4 else ''})"
    if value is None or isinstance(value, (int, np.integer)):
        return repr(value)
    return f"<{type(value).__name__}>"


_monitor: Monitor | None = None
_interrupt: Callable[[], object] | None = None


def join(ranks: MPI.Intracomm) -> None:
    """Watch over a new communicator, and start the monitor with the first one.

    Args:
        ranks: Its private duplicate.

    Raises:
        ValueError: ``CHAINERMN_STALL_SECONDS`` is not a number of seconds.
    """
    global _monitor
    limit = _limit()
    if not limit:
        return
    if _monitor is None:
        _monitor = Monitor(limit, abort=_is_set("CHAINERMN_STALL_ABORT"), stacks=_is_set("CHAINERMN_STALL_STACKS"))
        guard_thread.start(_monitor)
        # The thread must not be inside MPI when MPI is finalised. This happens later; or earlier, if the script
        # finalises MPI, which first frees the attributes of this communicator.
        at_exit(Step.FAREWELL, functools.partial(_end, _monitor))
        # In a forked child, too, where the thread is not this process's: the child also finalises MPI.
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: guard_thread.end()), True)
    _monitor.join(ranks)


def _end(monitor: Monitor) -> None:
    guard_thread.end()
    monitor.say_farewell()


def leave(ranks: MPI.Intracomm) -> None:
    """Stop watching over a communicator, before it is freed."""
    if _monitor is not None:
        _monitor.leave(ranks)


def finish() -> None:
    """Tell ranks that ask from now on that this rank has reached the end of its program, although it still waits."""
    if _monitor is not None:
        _monitor.finish()


def interrupt_by(interrupt: Callable[[], object]) -> None:
    """Replace the first effect of waiting for a rank that has ended, which is to end all ranks.

    Args:
        interrupt: Called in the monitor's thread; makes operations fail that wait for other ranks.
    """
    global _interrupt
    _interrupt = interrupt


def _forget() -> None:
    global _monitor
    _monitor = None


around_forks(after_in_child=_forget)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def _limit() -> float:
    text = os.environ.get("CHAINERMN_STALL_SECONDS", "60")
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ValueError(f"expected a number of seconds, 0 or more, in CHAINERMN_STALL_SECONDS, got {text!r}")
    return limit
