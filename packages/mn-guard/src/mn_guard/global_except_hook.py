"""An uncaught exception on one rank ends all ranks, which would otherwise wait for it forever."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import socket
import sys
import time
import warnings
from traceback import format_exc, format_exception_only
from types import TracebackType

from mn_comm.basis.mpi import has_been_finalized
from mn_guard import patience
from mn_guard.abort import abort_when_read, flush_until_read, say
from mn_guard.exit_status import other_end, share_exit_status
from mn_guard.interrupts import watch_interrupts

_VARIABLES = ("CHAINERMN_FORCE_ABORT_ON_EXCEPTION", "CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS")
"""The name that ChainerMN 7 read, and the name in Chainer's manual."""
_LONGEST_SUMMARY = 500
_PAUSE_SECONDS = 0.01


def add_hook() -> None:
    """Make an uncaught exception end all ranks with ``MPI_Abort``, after its traceback was printed.

    The previous hook prints the traceback. Exceptions in threads and ``SystemExit`` are not affected.

    Example:
        >>> chainermn.global_except_hook.add_hook()
    """
    there = sys.excepthook
    if not isinstance(there, _AbortAllRanks):
        sys.excepthook = _AbortAllRanks(there)
    elif there.is_asked_for:
        warnings.warn("the hook is already installed; adding it again does nothing", stacklevel=2)
    else:
        there.is_asked_for = True


def add_hook_if_enabled() -> None:
    """Add the hook if ``CHAINERMN_FORCE_ABORT_ON_EXCEPTION`` is set to anything but 0 or the empty string."""
    if _setting() not in ("", "0") and not isinstance(sys.excepthook, _AbortAllRanks):
        add_hook()


def add_hook_by_default() -> None:
    """Add the hook in a job of several processes: the others would wait forever for a rank that has raised.

    It is not added if the script has its own hook, in an interactive session, or if
    ``CHAINERMN_FORCE_ABORT_ON_EXCEPTION`` is 0. With the hook, Ctrl-C ends the job even while rank 0 waits for other
    ranks, and so does ``sys.exit`` with a status other than 0 on any rank.
    """
    from mpi4py import MPI

    if MPI.COMM_WORLD.size == 1:
        return
    is_wanted = _setting() != "0" and not _is_interactive()
    if is_wanted and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _AbortAllRanks(sys.excepthook, is_asked_for=False)
    if isinstance(sys.excepthook, _AbortAllRanks):
        share_exit_status(_rank())
        if _rank() == 0:
            watch_interrupts(functools.partial(_abort, "interrupted"))


def _setting() -> str:
    return next((os.environ[name] for name in _VARIABLES if name in os.environ), "")


def _is_interactive() -> bool:
    ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or ipython() is not None


class _AbortAllRanks:
    """An ``excepthook`` that calls the previous one, prints which rank raised, and aborts the job.

    If Chainer's ``Trainer`` has already printed the traceback, only the exception is printed. If a rank raises an
    exception of another rank, it first lets that rank print its message and end the job. If all ranks raise the same
    exception, rank 0 does so, after everything that the other ranks have printed. Ctrl-C usually reaches all ranks;
    then only the first one prints a line, without tracebacks.

    Args:
        previous: The previous hook.
        is_asked_for: Whether the script requested it.
    """

    def __init__(self, previous: object, is_asked_for: bool = True) -> None:
        self._previous = previous
        self._process = os.getpid()
        self.is_asked_for = is_asked_for

    def __call__(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if os.getpid() != self._process or has_been_finalized():  # a child process, or no other rank waits
            self._previous(kind, value, traceback)  # type: ignore[operator]
            return
        text = ""
        try:
            if issubclass(kind, KeyboardInterrupt):
                time.sleep(patience.OTHERS_AFTER_CTRL_C if _rank() else 0)
                return
            with contextlib.suppress(Exception, KeyboardInterrupt):  # a rank has died; the job must still end
                _let_the_right_rank_end(value)
            text = self._text_of(kind, value, traceback)
        finally:
            if issubclass(kind, KeyboardInterrupt):
                _abort("interrupted")
            else:
                end = other_end()
                if end is not None:
                    say(text)
                    text = ""
                    end("uncaught exception", 1)
                _abort("uncaught exception", details=_in_a_line(kind, value), text=text)

    def _text_of(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> str:
        """Return what must still be written of an exception; a previous hook of the script's writes by itself."""
        if _shown_by_trainer(value, traceback):
            return "".join(format_exception_only(kind, value))
        if self._previous is sys.__excepthook__:
            return _as_python_shows_it(kind, value, traceback)
        try:
            self._previous(kind, value, traceback)  # type: ignore[operator]
        except Exception:  # Python would show both, but only after this hook
            original = _as_python_shows_it(kind, value, traceback)
            return f"Error in sys.excepthook:\n{format_exc()}\nOriginal exception was:\n{original}"
        return ""


def _as_python_shows_it(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> str:
    """Return the text that Python's own hook writes, because the hook writes it in pieces."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        sys.__excepthook__(kind, value, traceback)
    return text.getvalue()


def _in_a_line(kind: type[BaseException], value: BaseException) -> str:
    """Return an exception's name and message in one line, without notes; only the name if it cannot be formatted."""
    lines = []
    with contextlib.suppress(Exception):  # raised by a method of the exception
        lines = format_exception_only(kind, value)
    return next((line for line in lines if line[:1].strip() and kind.__qualname__ in line), kind.__qualname__)


def _shown_by_trainer(value: BaseException, traceback: TracebackType | None) -> bool:
    """Return whether Chainer's trainer has printed this traceback; it does not print the tracebacks of causes."""
    if value.__cause__ is not None or (value.__context__ is not None and not value.__suppress_context__):
        return False
    names = ["", ""]
    show = False
    while traceback is not None:
        frame = traceback.tb_frame
        names = [names[-1], f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"]
        if names == ["chainer.training.trainer.run", "six.reraise"]:  # from the end of its loop
            return bool(show)
        show = frame.f_locals.get("show_loop_exception_msg", False)
        traceback = traceback.tb_next
    return False


def _let_the_right_rank_end(value: BaseException) -> None:
    """Wait if another rank should show an exception and end the job; return if none has."""
    if "raised_on_rank" in value.__dict__:
        time.sleep(patience.RIGHT_RANK)
    elif "raised_on_all_ranks" in value.__dict__ and other_end() is None:
        _let_rank_0_end()


def _let_rank_0_end() -> None:
    """Wait until the launcher has read the output of all ranks; then, on ranks other than 0, until rank 0 ends the job.

    Trainers print tracebacks of their own. One that came after the message would hide it, and several ranks that end
    the job at once cut each other's output short. If a rank does not come here within two seconds, the wait ends.
    """
    from mpi4py import MPI

    flush_until_read()
    everyone = MPI.COMM_WORLD.Ibarrier()
    deadline = time.monotonic() + patience.RIGHT_RANK
    while not everyone.Test():
        if time.monotonic() > deadline:
            return
        time.sleep(_PAUSE_SECONDS)
    if _rank() != 0:
        time.sleep(2 * patience.RIGHT_RANK)  # rank 0 waits, too, until its message has been read


def _rank() -> int:
    from mpi4py import MPI  # not at import: a script may add the hook before it chooses how MPI is initialised

    return MPI.COMM_WORLD.rank


def _abort(reason: str, details: str = "", text: str = "") -> None:
    # In one piece, so that the output of other ranks does not come in between.
    say(f"{text}\nchainermn: {reason} on rank {_rank()} ({socket.gethostname()}): ending all ranks\n")
    abort_when_read(1, ": ".join(filter(None, (reason, details.strip()[:_LONGEST_SUMMARY]))))
