"""Messages about what a rank was doing when it died, or when the job was ended.

If one rank dies, the launcher ends the others; a scheduler ends all ranks at the time limit. If they are ended by
SIGTERM (Open MPI, Slurm, Kubernetes, a plain ``kill``), each rank writes where its main thread is, and so in which
operation it was waiting; Python's own handlers do not run inside MPI. In a job of several processes, it writes this to
the process of its node (:mod:`mn_guard.death_reporter`), which prints one line, and also reports ranks that are killed
by a signal that they cannot handle.

If a rank itself ends the job, its launcher may discard output that it has not read yet; so the rank waits for it.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import fcntl
import functools
import importlib.util
import os
import signal
import stat
import sys
import termios
import time
from typing import TYPE_CHECKING, TextIO

from mn_guard import death_reporter, patience
from mn_guard.forks import around_forks
from mn_guard.job import is_tolerant

if TYPE_CHECKING:
    import socket

    from mn_comm.ranks.intracomm import Ranks

__all__ = ["abort_when_read", "flush_until_read", "folders_of_libraries", "say", "speak_when_ended"]

_NOT_THE_SCRIPT = (
    *(
        "mn_comm",
        "mn_compat",
        "mn_compress",
        "mn_elastic",
        "mn_guard",
        "mn_data",
        "mn_extensions",
        "mn_modelpar",
        "mn_optim",
        "chainermn_meta",
        "chainer",
    ),
    *("mpi4py", "numpy"),
)

_LAUNCHERS = ("prterun", "prted")
_PATIENCE_SECONDS = patience.UNREAD_OUTPUT
_PAUSE_SECONDS = 0.01


def speak_when_ended(within: Ranks) -> None:
    """From now on, have it said where this process was when SIGTERM or a fatal error ends it; collective within a node.

    In a job of several processes, the process of the node prints one line. Otherwise, Python writes the stack to
    stderr. If the program has its own handler for SIGTERM, or has enabled faulthandler, that stays as it is; a handler
    that the program installs later replaces this one.

    Args:
        within: The ranks of the node.
    """
    from mpi4py.MPI import COMM_WORLD as world  # not earlier, as below

    reader = death_reporter.connect(within, world.rank, world.size, folders_of_libraries()) if world.size > 1 else None
    _write_stacks(reader)


def folders_of_libraries() -> tuple[str, ...]:
    """Return the folders of these packages and of their dependencies, in which the user's script cannot be."""
    found = []
    for name in _NOT_THE_SCRIPT:
        with contextlib.suppress(ImportError, ValueError):  # not installed, or made by a program
            spec = importlib.util.find_spec(name)
            found += [os.path.join(folder, "") for folder in (spec and spec.submodule_search_locations) or ()]
    return tuple(found)


@functools.cache
def _write_stacks(reader: socket.socket | None) -> None:
    stacks = sys.__stderr__ if reader is None else reader
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # it has no file descriptor
        if reader is not None and not faulthandler.is_enabled():
            faulthandler.enable(reader, all_threads=False)
            around_forks(after_in_child=faulthandler.disable)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and stacks is not None:
            faulthandler.register(
                signal.SIGTERM,
                stacks,
                all_threads=False,
                chain=True,
            )
            # The workers of a pool are always ended by SIGTERM, so messages about it would only disturb.
            around_forks(after_in_child=functools.partial(faulthandler.unregister, signal.SIGTERM))


def say(text: str) -> None:
    """Write to stderr, and continue if that fails: the job must still end."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def abort_when_read(status: int = 1, summary: str = "") -> None:
    """End the job by ``MPI_Abort``, once the launcher has read what this rank wrote, or after two seconds.

    With ``--with-ft ulfm``, Open MPI 5 leaves the other ranks alone after ``MPI_Abort``, and they may wait forever. In
    this case, the launcher itself is ended.

    Args:
        status: The exit status of the job; with ``--with-ft ulfm``, the job's status is 1.
        summary: The reason, in one line.
    """
    from mpi4py import MPI  # not at import: a script may install the hook before it chooses how MPI is initialised

    from mn_guard.supervised import report  # not at import: that module imports this one

    flush_until_read()
    death_reporter.has_spoken(summary)
    report.has_failed(status, summary)
    launcher = _launcher() if is_tolerant() else None
    if launcher is not None:
        os.kill(launcher, signal.SIGTERM)
    MPI.COMM_WORLD.Abort(status)


def _launcher() -> int | None:
    """Return the process ID of Open MPI's launcher on this node, an ancestor of this process; ``None`` if unknown."""
    process = os.getppid()
    with contextlib.suppress(OSError, ValueError):
        while process > 1:
            with open(f"/proc/{process}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name in _LAUNCHERS:
                return process
            process = int(rest.split()[1])
    return None


def flush_until_read() -> None:
    """Wait until the launcher has read what this rank wrote, two seconds at most."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(Exception):  # no stream, no file descriptor, or closed: there is nothing to wait for
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
