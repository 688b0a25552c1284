"""How a rank ends while the others notice it and continue.

The other ranks notice the death of a process immediately. But if a process ends with a status other than 0, they wait
forever (Open MPI 5.0), so the process kills itself instead. The launcher then regards the job as successful. So a rank
first asks the others whether they are leaving as well. If all are, it ends with its status, which becomes the status of
the job.

A rank that ends normally also does this. After a loss, it ends without ``MPI_Finalize``, which sometimes waits for the
dead rank (Open MPI 5.0.11, in about one of twenty jobs if the loss was a few milliseconds ago).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import signal
import socket
import sys
import threading
import traceback
from types import FrameType
from typing import NoReturn, Protocol

from mn_comm.basis.mpi import MPI
from mn_comm.ranks.background import close_all
from mn_guard import death_reporter, exit_status, guard_thread, stall
from mn_guard.abort import flush_until_read, ignore_handlers, say
from mn_guard.exit_sequence import Step, at_exit
from mn_guard.forks import around_forks, block_during_forks
from mn_guard.job import BY_SIGNAL, detects
from mn_guard.supervised import report

_exit = os._exit
_PATIENCE_SECONDS = 3.0  # until the others vote, unless they have reached the end of the script
_FINALIZED = 5  # OMPI_MPI_STATE_FINALIZE_COMPLETED

asked_to_leave = threading.Event()
"""Set by SIGTERM."""
_party: Party | None = None


class Party(Protocol):
    """The other ranks, which this rank can leave."""

    @property
    def has_lost(self) -> bool:
        """Whether a rank was lost or has failed, also one that this rank has noticed only while it was leaving."""

    @property
    def is_torn(self) -> bool:
        """Whether this rank has left the middle of what the ranks agree on, so that only its death helps the others."""

    def take_leave(self, *, at_once: bool) -> bool:
        """Inform the others, and return whether all of them are leaving."""

    def interrupt(self) -> None:
        """Make operations fail in which ranks wait for one that has left; called in another thread."""


def end_alone(party: Party) -> None:
    """From now on, let this rank end without ending the others.

    An uncaught exception and an exit status other than 0 end only this process. After SIGTERM, it finishes its step and
    leaves; after a second SIGTERM, it ends immediately. If the script has its own handler, this handler stays.

    Args:
        party: The other ranks.
    """
    global _party
    _party = party
    _install(party)


def is_shared() -> bool:
    """Return whether other ranks must be informed before this rank ends."""
    return _party is not None


def end_as_spare(*, in_vain: bool) -> NoReturn:
    """End a spare that has not been needed, when the job is over.

    Args:
        in_vain: Whether the job has failed: all ranks that trained are lost, and no other process has their state.
    """
    if not in_vain:
        raise SystemExit(0)
    reason = "all ranks that trained are gone"
    _explain(f"{reason}, the spare that waits as process {MPI.COMM_WORLD.rank} ends", reason, 1)
    _exit(1)


def end_as_minority(left: int, before: int) -> NoReturn:
    """End this process. All ranks of this part do so, because a larger part may be alive and continue.

    Args:
        left: The number of ranks in this part.
        before: The number of ranks before the loss.
    """
    _leave(f"only {left} of {before} ranks are left, not more than half, with failure detection", 1)


def leave_as_asked() -> NoReturn:
    """End this process after SIGTERM; must be called when all ranks have completed a step."""
    _leave("SIGTERM", BY_SIGNAL + signal.SIGTERM)


def _install(party: Party) -> None:
    process = os.getpid()
    exit_status.end_by(_leave)
    exit_status.share_exit_status(MPI.COMM_WORLD.rank)
    stall.interrupt_by(party.interrupt)
    os._exit = functools.partial(_leave_or_exit, process)
    for function in (functools.partial(_take_leave, party), close_all, _end_after_exception):  # the last one is first
        at_exit(Step.LEAVE, function)
    is_ours_to_handle = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours_to_handle and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _note)
        if guard_thread.thread.receive_signals():
            guard_thread.thread.add(_EndAtOnce())
        # The workers of a pool are always ended by SIGTERM.
        around_forks(after_in_child=_have_no_handler)
        block_during_forks(signal.SIGTERM, _note)


def _leave_or_exit(process: int, status: int) -> NoReturn:
    """Take the place of ``os._exit``, of which MPI does not inform the others if the status is not 0."""
    if status and os.getpid() == process and not MPI.Is_finalized():
        _leave(f"os._exit({status})", status)
    if os.getpid() == process:
        death_reporter.has_finished()
    _exit(status)


def _leave(reason: str, status: int) -> NoReturn:
    """End this process or, if no rank continues, the job."""
    ignore_handlers()
    where = f"rank {MPI.COMM_WORLD.rank} ({socket.gethostname()})"
    _explain(f"{reason} on {where}: this rank ends", reason, status)
    _end_within(_PATIENCE_SECONDS)
    try:
        _end_job_if_all_leave(status)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(status)  # not reached


def _end_within(seconds: float) -> None:
    """Let SIGALRM end this process, wherever it then waits: at exit, Python 3.12 starts no thread that could do so."""
    ctypes.CDLL(None).signal(signal.SIGALRM, None)  # instead of a handler of the script; works in any thread
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _explain(text: str, reason: str, status: int) -> None:
    """Let it be known why this process ends: to the user, and to the processes that would report its death."""
    _tell(text)
    report.has_failed(status, reason)


def _tell(text: str) -> None:
    """Tell the user, and the process of the node, which then does not report this process's death."""
    say(f"\nchainermn: {text}\n")
    flush_until_read()
    death_reporter.has_explained()


def _end_job_if_all_leave(status: int) -> None:
    assert _party is not None  # otherwise, this is not called
    if _party.take_leave(at_once=True):
        say("chainermn: no rank continues: the job ends\n")
        flush_until_read()
        report.job_ends()
        _exit(status)  # if several ranks call MPI_Abort, the launcher sometimes hangs


def _end_after_exception() -> None:
    """Leave immediately if the script has its own hook for exceptions, or does not want one."""
    if hasattr(sys, "last_type") and not MPI.Is_finalized():
        _leave("uncaught exception", 1)


def _take_leave(party: Party) -> None:
    """Wait until all others end as well, or know that this rank ends."""
    if MPI.Is_finalized():
        return
    are_all = False
    try:
        stall.finish()
        are_all = not party.is_torn and party.take_leave(at_once=False)
    except BaseException:  # raised by a signal handler of the script
        traceback.print_exc()
    finally:
        try:
            ignore_handlers()  # the next signal must not keep this rank from ending
        finally:  # it may have raised before it was ignored
            _finish_leaving(party, together=are_all)


def _finish_leaving(party: Party, *, together: bool) -> None:
    if party.is_torn:
        _end_torn()
    report.leave(together=together)
    # With the failure detector, MPI_Finalize also hangs (Open MPI 5.0.11).
    if not together or party.has_lost or detects():
        _skip_finalize()


def _end_torn() -> None:
    """End this process: the others notice its death, but may otherwise wait forever for what this rank has left."""
    try:
        ignore_handlers()
        why = "an exception, for example of a signal handler, has left what the ranks agree on"
        _tell(f"{why}, on rank {MPI.COMM_WORLD.rank}: this rank ends")
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def _skip_finalize() -> None:
    """End this process without ``MPI_Finalize``, and with the status that Python then asks for.

    MPI has no function for this, so Open MPI's variable says that it was finalized, after all other cleanup of Python.
    Then the cleanup of C libraries is omitted as well: their threads may be waiting for the dead rank.
    """
    with contextlib.suppress(ValueError, AttributeError):  # there is no such variable, or no such function
        _very_end.state = ctypes.c_int.in_dll(ctypes.CDLL(MPI.__file__), "ompi_mpi_state")
        c_library = ctypes.CDLL(None)
        c_library.on_exit(c_library["_exit"], None)


class _VeryEnd:
    """Is deleted after all other cleanup of Python, but before mpi4py finalizes MPI."""

    state: ctypes.c_int | None = None

    def __del__(self, finalized: int = _FINALIZED) -> None:
        if self.state is not None:
            self.state.value = finalized


_very_end = _VeryEnd()


class _EndAtOnce:
    """Ends this process at the second SIGTERM, also while the main thread is inside MPI, where no handler can run."""

    due = math.inf

    def __init__(self) -> None:
        self._count = 0

    def attend(self, signals: bytes) -> None:
        """Count what has arrived, unless the script has a handler of its own."""
        if signal.getsignal(signal.SIGTERM) is _note:
            self._count += signals.count(signal.SIGTERM)
        if self._count > 1:
            _tell(f"another SIGTERM on rank {MPI.COMM_WORLD.rank}: it ends immediately")
            os.kill(os.getpid(), signal.SIGKILL)


def _note(number: int, frame: FrameType | None) -> None:
    if asked_to_leave.is_set():
        _have_no_handler()
        os.kill(os.getpid(), number)
    asked_to_leave.set()


def _have_no_handler() -> None:
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
