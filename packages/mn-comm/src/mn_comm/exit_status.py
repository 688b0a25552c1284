"""A rank that ends with a status other than 0 ends the job with that status; the others would wait for it for ever.

Python calls no hook when :class:`SystemExit` ends a program. But it drops the exception then, and no function is
running any more; one that was caught is dropped inside some function.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from typing import NoReturn

from mn_comm.last_words import wait_until_read

__all__ = ["share_exit_status"]

_GRACE_SECONDS = 1.0  # for other ranks that end as well, and are writing what they have to say


class _Exit(SystemExit):
    """What ``sys.exit`` raises; it notices that nobody has caught it."""

    process: int
    uncaught: list[object] = []  # noqa: RUF012 - of the class
    """The statuses of those that nobody has caught: first the one that ends the program, then its causes."""

    def __del__(self) -> None:
        if os.getpid() != self.process or sys.is_finalizing():
            return
        try:
            sys._getframe(1)  # noqa: SLF001 - the documented way to the caller, of whom there is none then
        except ValueError:
            self.uncaught.append(self.code)


def share_exit_status(rank: int) -> None:
    """From now on, let ``sys.exit`` with a status other than 0 end all ranks, unless the exception is caught.

    Args:
        rank: This process's rank.
    """
    if getattr(sys.exit, "__module__", None) == __name__:
        return
    _Exit.process = os.getpid()

    def exit(status: object = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(status), and end all ranks unless the status is None or 0."""
        # What ends a thread is known by its exact class.
        raise (_Exit if threading.current_thread() is threading.main_thread() else SystemExit)(status)

    sys.exit = exit
    atexit.register(_end_all, rank)  # not where it is noticed: Python has not written the message yet


def _end_all(rank: int) -> None:
    status = _Exit.uncaught[0] if _Exit.uncaught else 0
    if status in (None, 0) or os.getpid() != _Exit.process:
        return
    from mpi4py.run import set_abort_status

    number = status if isinstance(status, int) else 1
    sys.stderr.write(f"\nchainermn: exit status {number} on rank {rank} ({socket.gethostname()}): ending all ranks\n")
    for stream in (sys.stderr, sys.stdout):
        wait_until_read(stream)
    time.sleep(_GRACE_SECONDS)
    set_abort_status(number)  # when MPI is finalised, after everything else that is to be done at the end
