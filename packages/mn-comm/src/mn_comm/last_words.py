"""What a rank was doing when the job is ended around it.

If one rank dies, the launcher ends the others; a scheduler ends all of them when their time is over. Where that comes
as SIGTERM (Open MPI, Slurm, Kubernetes, a plain ``kill``), each rank writes where its main thread is, which names the
operation that it waited in; Python's own handlers could not, as they do not run inside MPI. MPICH's ``mpiexec`` sends
SIGKILL, after which nobody says anything.

Where a rank itself ends the job, its launcher may forget what it has not read yet; so it waits for that.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import fcntl
import functools
import os
import signal
import stat
import sys
import termios
import time
from typing import TextIO

__all__ = ["abort_when_read", "flush_until_read", "say", "speak_when_ended"]

_PATIENCE_SECONDS = 2.0
_PAUSE_SECONDS = 0.01


@functools.cache
def speak_when_ended() -> None:
    """From now on, let SIGTERM write a traceback to stderr before it ends the process, as it would without.

    Where the program has a handler of its own for it, nothing is done; one that it installs later replaces this.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or sys.__stderr__ is None:
        return
    try:
        faulthandler.register(signal.SIGTERM, sys.__stderr__, all_threads=False, chain=True)
    except (OSError, ValueError, RuntimeError):  # there is no file behind it
        return
    # The workers of a pool are ended by SIGTERM every time, and nobody wants to hear of it.
    os.register_at_fork(after_in_child=_be_silent)


def say(text: str) -> None:
    """Write to stderr, and go on if that cannot be: the job has to end all the same."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def abort_when_read(status: int = 1) -> None:
    """End the job by ``MPI_Abort``, once the launcher has read what this rank wrote, or after two seconds."""
    from mpi4py import MPI  # not earlier: a script may add the hook before it chooses how MPI is initialised

    flush_until_read()
    MPI.COMM_WORLD.Abort(status)


def flush_until_read() -> None:
    """Wait until the launcher has read what this rank wrote, two seconds at most."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(Exception):  # no stream, no file behind it, or closed: there is nothing to wait for
            _wait_until_read(stream)


def _wait_until_read(stream: TextIO) -> None:
    stream.flush()
    descriptor = stream.fileno()
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return
    unread = array.array("i", [0])
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        fcntl.ioctl(descriptor, termios.FIONREAD, unread)
        if not unread[0]:
            return
        time.sleep(_PAUSE_SECONDS)


def _be_silent() -> None:
    faulthandler.unregister(signal.SIGTERM)
