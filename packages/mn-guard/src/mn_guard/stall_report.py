"""What a rank is doing, in words, for the stall monitor."""

from __future__ import annotations

import inspect
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from mn_comm.basis.mpi import MPI
from mn_comm.ranks.watch import Activity, Call, Wait
from mn_guard.crash_output import folders_of_libraries
from mn_guard.node_process import is_of_script


def describe(doing: Sequence[Activity], occasion: str, notes: Sequence[str], *, stacks: bool) -> list[str]:
    """Return lines about what this rank is doing.

    Args:
        doing: The activities of its threads.
        occasion: Why it says so, to be added to its name.
        notes: Further lines.
        stacks: Whether to add the stacks of threads that wait.
    """
    world = MPI.COMM_WORLD
    place = f"rank {world.rank} of {world.size} ({MPI.Get_processor_name()}){occasion}"
    # A thread may stop waiting, and end its calls, at any moment.
    waits = [(activity, wait, list(activity.calls)) for activity in doing if (wait := activity.wait) is not None]
    lines = [f"{place} {_describe_wait(*each)}" for each in waits] or [f"{place} {_describe_idle(doing)}"]
    for _, _, calls in waits:
        lines += _other_messages(calls)
    lines += [f"  {note}" for note in notes]
    for activity, _, _ in waits if stacks else ():
        stack = [f"    {each.filename}:{each.lineno} in {each.name}: {each.line}" for each in _frames(activity.thread)]
        lines += ["  its stack:", *stack]
    return lines


def bind(call: Call) -> inspect.BoundArguments:
    """Return the arguments of a call by their names."""
    return inspect.signature(call.function).bind(*call.arguments, **call.keywords)


def ranks_of(call: Call) -> MPI.Intracomm | None:
    """Return the ranks of the communicator to which an operation belongs."""
    return getattr(call.arguments[0] if call.arguments else None, "ranks", None)


def _describe_wait(activity: Activity, wait: Wait, calls: Sequence[Call]) -> str:
    what, ranks, since = wait
    describe_purpose = activity.purpose
    purpose = f" for {describe_purpose()}" if describe_purpose else ""
    seconds = f"has waited for {(time.monotonic_ns() - since) / 1e9:.1f} s"
    if not calls:
        return f"{seconds} in {what}{purpose}, {_place(activity.thread)}"
    group = ranks_of(calls[-1]) or ranks
    group_of = (
        f" as rank {group.rank} of {group.size}" if group is not None and group.size != MPI.COMM_WORLD.size else ""
    )
    return f"{seconds} in {_describe_call(calls[0])}{group_of}{purpose}, {_place(activity.thread)}"


def _describe_idle(doing: Sequence[Activity]) -> str:
    main = threading.main_thread().ident or 0
    finished = next((activity.finished for activity in doing if activity.thread == main), ())
    return f"is not waiting for other ranks; {_place(main)}; it finished last: {', '.join(finished) or 'nothing'}"


def _describe_call(call: Call) -> str:
    bound = bind(call)
    bound.apply_defaults()
    shown = {name: value for name, value in bound.arguments.items() if name != "self"}
    return f"{call.function.__name__}({', '.join(f'{name}={_describe(value)}' for name, value in shown.items())})"


def _place(thread: int) -> str:
    """Return the script's line that a thread is executing: for a worker, that of the main thread."""
    of_thread, of_main = _frames(thread), _frames(threading.main_thread().ident or 0)
    found = _of_script(of_thread) or _of_script(of_main) or of_main
    if not found:
        return "at an unknown place"
    frame = found[-1]
    line = f": {frame.line}" if frame.line else ""  # python -c has no file
    return f"at {frame.filename}:{frame.lineno} in {frame.name}{line}"


def _frames(thread: int) -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the documented way to another thread's stack
    return list(traceback.extract_stack(frame)) if frame is not None else []


def _of_script(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    folders = folders_of_libraries()
    return [frame for frame in frames if is_of_script(frame.filename, frame.name, folders)]


def _other_messages(calls: Sequence[Call]) -> list[str]:
    """Describe messages that have arrived with a different tag than the one that a ``recv`` waits for."""
    call = calls[-1] if calls else None
    if call is None or call.function.__name__ != "recv" or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return []
    status = MPI.Status()
    if not call.arguments[0].mpi_comm.Iprobe(bind(call).arguments["source"], MPI.ANY_TAG, status):
        return []
    return [f"  a message from rank {status.source} has arrived, but no receive waits for its tag {status.tag}"]


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"<{value.dtype} array of shape {value.shape}>"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_describe, value[:4]))}{', ...' if len(value) > 4 else ''})"
    if value is None or isinstance(value, (int, np.integer)):
        return repr(value)
    return f"<{type(value).__name__}>"
