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
import time
from contextlib import AbstractContextManager
from types import FrameType
from typing import NoReturn, Protocol

from mn_comm.basis.mpi import MPI
from mn_comm.ranks.background import close_all
from mn_guard import death_reporter, exit_status, guard_thread, handlers, stall
from mn_guard.abort import flush_until_read, say
from mn_guard.exit_sequence import Step, at_exit
from mn_guard.forks import around_forks, block_during_forks
from mn_guard.job import detects, leads_its_processes
from mn_guard.supervised import report

_exit = os._exit
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 3.0  # until the others vote, unless they have reached the end of the script
_FINALIZED = 5  # OMPI_MPI_STATE_FINALIZE_COMPLETED
_BY_SIGNAL = 128  # a shell's exit status for a process that was ended by a signal

asked_to_leave = threading.Event()
"""Set by SIGTERM."""
_parties: list[Party] = []
_is_leaving = threading.Event()


class Party(Protocol):
    """The other ranks, which this rank can leave."""

    @property
    def has_lost(self) -> bool:
        """Whether a rank was lost or has failed, also one that this rank has noticed only while it was leaving."""

    @property
    def is_revoked(self) -> bool:
        """Whether the others will continue without a rank that has left; may be read in another thread."""

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
    _parties.append(party)
    _install()
    if len(_parties) > 1 and guard_thread.thread.find(_EndIfMissed) is None:
        guard_thread.thread.add(_EndIfMissed())


def is_shared() -> bool:
    """Return whether other ranks must be informed before this rank ends."""
    return bool(_parties)


def undisturbed() -> AbstractContextManager[None]:
    """Return a context in which signal handlers of the script are deferred: what the ranks agree on must be completed.

    Ctrl-C is not deferred: it ends the job.
    """
    return handlers.deferred(_note, signal.default_int_handler)


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
    _leave("SIGTERM", _BY_SIGNAL + signal.SIGTERM)


@functools.cache
def _install() -> None:
    process = os.getpid()
    exit_status.end_by(_leave)
    exit_status.share_exit_status(MPI.COMM_WORLD.rank)
    stall.interrupt_by(_interrupt)
    os._exit = functools.partial(_leave_or_exit, process)
    for function in (_take_leave, close_all, _end_after_exception):  # the last one is called first
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
    _exit(status)


def _leave(reason: str, status: int) -> NoReturn:
    """End this process or, if no rank continues, the job."""
    where = f"rank {MPI.COMM_WORLD.rank} ({socket.gethostname()})"
    with undisturbed():
        try:
            _explain(f"{reason} on {where}: this rank ends", reason, status)
            _end_within(_PATIENCE_SECONDS)
            _end_job_if_all_leave(status)
        finally:
            _kill()
    raise SystemExit(status)  # not reached


def _kill() -> None:
    """End this process, and those that it has started, as launchers do: Open MPI's waits for their output."""
    os.kill(-os.getpid() if leads_its_processes() else os.getpid(), signal.SIGKILL)


def _end_within(seconds: float) -> None:
    """Let SIGALRM end this process, wherever it then waits: at exit, Python 3.12 starts no thread that could do so."""
    ctypes.CDLL(None).signal(signal.SIGALRM, None)  # instead of a handler of the script; works in any thread
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _explain(text: str, reason: str, status: int) -> None:
    """Let it be known why this process ends: to the user, and to the processes that would report its death."""
    say(f"\nchainermn: {text}\n")
    flush_until_read()
    death_reporter.has_explained()
    report.has_failed(status, reason)


def _end_job_if_all_leave(status: int) -> None:
    if _parties[-1].take_leave(at_once=True):
        say("chainermn: no rank continues: the job ends\n")
        flush_until_read()
        report.job_ends()
        _exit(status)  # if several ranks call MPI_Abort, the launcher sometimes hangs


def _end_after_exception() -> None:
    """Leave immediately if the script has its own hook for exceptions, or does not want one."""
    if hasattr(sys, "last_type") and not MPI.Is_finalized():
        _leave("uncaught exception", 1)


def _take_leave() -> None:
    """Wait until all others end as well, or know that this rank ends."""
    if MPI.Is_finalized():
        return
    stall.finish()
    _is_leaving.set()
    with undisturbed():
        are_all = _parties[-1].take_leave(at_once=False)
    report.leave(together=are_all)
    # With the failure detector, MPI_Finalize also hangs (Open MPI 5.0.11).
    # Any of them: a program with two communicators may have used only one of them since the loss.
    if not are_all or any(party.has_lost for party in _parties) or detects():
        _skip_finalize()


def _interrupt() -> None:
    for party in _parties:
        party.interrupt()


def _skip_finalize() -> None:
    """End this process without ``MPI_Finalize``, and with the status that Python then asks for.

    MPI has no function for this, so Open MPI's variable says that it was finalized, after all other cleanup of Python.
    Then the cleanup of C libraries is omitted as well: their threads may be waiting for the dead rank.
    """
    with contextlib.suppress(ValueError, AttributeError):  # there is no such variable, or no such function
        _very_end.state = ctypes.c_int.in_dll(ctypes.CDLL(MPI.__file__), "ompi_mpi_state")
        c_library = ctypes.CDLL(None)
        c_library.on_exit(c_library["_exit"], None)
        c_library["__cxa_atexit"](c_library["fflush"], None, None)  # before that, all streams


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
            say(f"\nchainermn: another SIGTERM on rank {MPI.COMM_WORLD.rank}: it ends immediately\n")
            flush_until_read()
            death_reporter.has_explained()
            _kill()


class _EndIfMissed:
    """Ends this process while it leaves the ranks of its last communicator, if they give up an earlier one.

    They wait for this process there, but it cannot leave all communicators at once.
    """

    due = 0.0

    def attend(self, signals: bytes) -> None:
        """Look whether an earlier communicator was revoked."""
        self.due = time.monotonic() + _LOOK_SECONDS
        if _is_leaving.is_set() and any(party.is_revoked for party in _parties[:-1]):
            _kill()


def _note(number: int, frame: FrameType | None) -> None:
    if asked_to_leave.is_set():
        _have_no_handler()
        os.kill(os.getpid(), number)
    asked_to_leave.set()


def _have_no_handler() -> None:
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
