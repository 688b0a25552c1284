"""How a rank ends alone: the others notice, and go on.

They notice the death of a process at once. But one that ends with a status other than 0, in whichever way, leaves them
waiting (Open MPI 5.0): so it kills itself instead. As the launcher then takes the job for a success, a rank first takes
leave of the others: if it finds that all are ending, it ends with its status, which is then that of the job.

A rank that ends well takes leave as well. After a loss it ends without ``MPI_Finalize``, which now and then waits for
the dead (Open MPI 5.0.11, about once in twenty times if the loss was some milliseconds ago).
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, Protocol

from mn_comm import exit_status, global_except_hook
from mn_comm.elastic.support import detects
from mn_comm.last_words import flush_until_read, say
from mn_comm.mpi import MPI
from mn_comm.supervised import report
from mn_comm.worker import close_all

__all__ = ["asked_to_leave", "end_alone", "end_as_minority", "end_as_spare", "is_shared", "leave_as_asked"]

_PATIENCE_SECONDS = 3.0  # for the others to come to a vote; they may have come to the end of the script instead
_BY_SIGNAL = 128  # a shell's status of a process that a signal has ended

asked_to_leave = threading.Event()
"""Set by SIGTERM."""
_parties: list[Party] = []


class Party(Protocol):
    """What a rank takes leave of."""

    @property
    def generation(self) -> int:
        """How many losses there were."""
        ...

    def take_leave(self, *, at_once: bool) -> bool:
        """Tell the others, and return whether all of them are leaving."""
        ...


def end_alone(party: Party) -> None:
    """From now on, let this rank end without the others.

    An uncaught exception and an exit status other than 0 end this process only. After SIGTERM it finishes its step, and
    leaves; after a second one it ends at once. Where the script has a handler of its own, that stays.

    Args:
        party: The others.
    """
    _parties.append(party)
    _install()


def is_shared() -> bool:
    """Return whether there are others from whom this rank would take leave."""
    return bool(_parties)


def end_as_spare(*, in_vain: bool) -> NoReturn:
    """End a process that has waited for its turn to train, when the job is over.

    Args:
        in_vain: Whether it has not come to its end: all who trained are gone, and nobody else has their state.
    """
    if not in_vain:
        raise SystemExit(0)
    reason = "all ranks that trained are gone"
    say(f"\nchainermn: {reason}, the spare that waits as process {MPI.COMM_WORLD.rank} ends\n")
    flush_until_read()
    report.has_failed(1, reason)
    os._exit(1)


def end_as_minority(left: int, before: int) -> NoReturn:
    """End this process, as all others that it can hear do: more may be alive that take them for dead.

    Args:
        left: How many of them there are.
        before: How many there were.
    """
    _leave(f"only {left} of {before} ranks are left, not more than half, with failure detection", 1)


def leave_as_asked() -> NoReturn:
    """End this process after SIGTERM; to be called where all ranks have come through a step."""
    _leave("SIGTERM", _BY_SIGNAL + signal.SIGTERM)


@functools.cache
def _install() -> None:
    process = os.getpid()
    global_except_hook.end_by(_leave)
    exit_status.end_by(_leave)
    exit_status.share_exit_status(MPI.COMM_WORLD.rank)
    exit_status.at_exit(functools.partial(_end, process))
    is_ours_to_handle = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours_to_handle and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _note)
        # The workers of a pool are ended by SIGTERM every time.
        os.register_at_fork(after_in_child=_have_no_handler)


def _leave(reason: str, status: int) -> NoReturn:
    """End this process, or, if none is left that goes on, the job."""
    say(f"\nchainermn: {reason} on rank {MPI.COMM_WORLD.rank} ({socket.gethostname()}): it ends, others go on\n")
    flush_until_read()
    report.has_failed(status, reason)
    talk = threading.Thread(target=_end_job_if_all_leave, args=(status,), name="chainermn-leave", daemon=True)
    talk.start()
    talk.join(_PATIENCE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(status)  # not reached


def _end_job_if_all_leave(status: int) -> None:
    if _parties[0].take_leave(at_once=True):
        say("chainermn: no rank goes on: the job ends\n")
        flush_until_read()
        report.job_ends()
        os._exit(status)  # several ranks that call MPI_Abort now and then make the launcher hang


def _end(process: int) -> None:
    """Leave at once after a failure; else wait until all others end as well, or know that this rank does."""
    if os.getpid() != process or MPI.Is_finalized():
        return
    if hasattr(sys, "last_type"):  # the script has a hook of its own for exceptions, or wants none
        _leave("uncaught exception", 1)
    close_all()
    are_all = _parties[0].take_leave(at_once=False)
    report.leave(together=are_all)
    # With the failure detector MPI_Finalize hangs as well (Open MPI 5.0.11).
    if not are_all or _parties[0].generation or detects():
        _very_end.skips_finalize = True


class _VeryEnd:
    """Ends the process when Python has done all else: before libraries in C end, of which MPI is one."""

    skips_finalize = False

    def __del__(self, end: Callable[[int], NoReturn] = os._exit) -> None:
        if self.skips_finalize:
            end(0)


_very_end = _VeryEnd()


def _note(number: int, frame: FrameType | None) -> None:
    if asked_to_leave.is_set():
        _have_no_handler()
        os.kill(os.getpid(), number)
    asked_to_leave.set()


def _have_no_handler() -> None:
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
