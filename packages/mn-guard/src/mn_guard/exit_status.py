"""A rank that ends with a status other than 0 ends the job with that status; otherwise the others would wait forever.

Python calls no hook when :class:`SystemExit` ends a program. But from 3.12 on, :mod:`sys.monitoring` reports which
functions an exception leaves, without slowing down anything else, and so also when it leaves the outermost one.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import Any, NoReturn

from mn_comm.basis.mpi import has_been_finalized
from mn_guard import patience
from mn_guard.abort import abort_when_read, ignore_handlers, say
from mn_guard.exit_sequence import Step, at_exit, statuses

_GRACE_SECONDS = patience.EXIT
_LONGEST_TEXT = 500
_BITS = 64  # of a C long, with its sign
_TOOLS = (3, 4)  # numbers that Python's documentation does not assign to any kind of tool

_end: Callable[[str, int], object] | None = None


@functools.cache
def share_exit_status(rank: int) -> None:
    """From now on, let a status other than 0 end all ranks when this process ends with it. A second call does nothing.

    Args:
        rank: This process's rank.
    """
    statuses.append(None)
    if sys.version_info >= (3, 12):
        _note_what_leaves_the_outermost_function()
    else:
        _note_what_python_asks_for()
    at_exit(Step.STATUS, functools.partial(_end_all, rank))


def end_by(end: Callable[[str, int], object]) -> None:
    """Let a status other than 0, or an uncaught exception, end this rank alone; Ctrl-C still ends all ranks.

    Args:
        end: Ends this process; called with the reason, and the exit status.
    """
    global _end
    _end = end


def asked_for() -> int:
    """Return the status with which the program has ended; 0 if it has not ended.

    It may still wait for threads of its own, or in functions that it has registered with :mod:`atexit`.
    """
    return _as_number(statuses[-1]) if statuses else 0


def other_end() -> Callable[[str, int], object] | None:
    """Return what was passed to :func:`end_by`; ``None`` if all ranks are to end."""
    return _end


def _note_what_leaves_the_outermost_function() -> None:
    outermost = sys._current_frames()[threading.main_thread().ident or 0]  # noqa: SLF001 - documented
    while outermost.f_back is not None:
        outermost = outermost.f_back

    def leaves(code: CodeType, offset: int, error: BaseException) -> None:
        if isinstance(error, SystemExit) and sys._getframe(1) is outermost:  # noqa: SLF001 - documented
            statuses.append(error.code)

    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    for tool in _TOOLS:
        if monitoring.get_tool(tool) is None:
            monitoring.use_tool_id(tool, "chainermn")
            monitoring.register_callback(tool, monitoring.events.PY_UNWIND, leaves)
            monitoring.set_events(tool, monitoring.events.PY_UNWIND)
            return


def _note_what_python_asks_for() -> None:
    """Record, without monitoring, the ``code`` of a SystemExit that is read when no function is running.

    This is for Python 3.10 and 3.11, which will not change any more. It does not work for ``sys.exit(main())``, where
    ``sys.exit`` is looked up before ``main`` gets here: the C function does not create an exception object that could
    be inspected.
    """
    (members,) = gc.get_referents(SystemExit.__dict__)
    member = members["code"]

    def code(error: SystemExit) -> object:
        value = member.__get__(error)
        try:
            sys._getframe(1)  # noqa: SLF001 - documented
        except ValueError:
            statuses.append(value)
        return value

    def exit(status: object = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(status)."""
        raise SystemExit(status)

    members["code"] = property(code, member.__set__, member.__delete__)
    modified: Callable[..., None] = ctypes.pythonapi.PyType_Modified
    modified(ctypes.py_object(SystemExit))
    sys.exit = exit


def _end_all(rank: int) -> None:
    status = asked_for()
    if not status or has_been_finalized():
        return
    if _end is not None:
        _end(f"exit status {status}", status)
    ignore_handlers()
    say(f"\nchainermn: exit status {status} on rank {rank} ({socket.gethostname()}): ending all ranks\n")
    time.sleep(_GRACE_SECONDS)
    text = statuses[-1] if isinstance(statuses[-1], str) else ""
    abort_when_read(status, f"exit status {status}" + (f": {text[:_LONGEST_TEXT]}" if text else ""))


def _as_number(status: object) -> int:
    """Return the exit status that the launcher will see."""
    if status is None:
        return 0
    if not isinstance(status, int):
        return 1
    return status & 0xFF if status.bit_length() < _BITS else 255  # as Python, which then passes -1 on
