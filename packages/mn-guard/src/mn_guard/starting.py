"""A message if ``MPI_Init`` does not return, because another rank has died or has not reached it.

``MPI_Init`` waits for all ranks, and mpi4py holds Python's lock meanwhile, so no thread of Python could say anything.
So a child process waits beside it, only until ``MPI_Init`` has returned.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
from collections.abc import Iterator, Mapping

from mn_guard.job import RANKS, as_number

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# Its standard input is a pipe, which ends when MPI_Init has returned, or when the rank has died.
# A status other than that of `timeout` also means that there is no such command.
_WAIT = "timeout {seconds} cat >/dev/null 2>&1; [ $? = 124 ] || exit 0; echo {message} >&2"


@contextlib.contextmanager
def watched_start(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Within this context, MPI is initialised; in a job of several processes, a message is printed if this takes long.

    Args:
        environ: The environment. ``CHAINERMN_STALL_SECONDS`` is the time, 0 for never, and with
            ``CHAINERMN_STALL_ABORT=1`` this process ends after the message.
    """
    command = _command(environ)
    receiving, sending = os.pipe() if command else (-1, -1)
    child = _spawn(command, receiving) if command else 0
    try:
        yield
    finally:
        for descriptor in (receiving, sending) if command else ():
            os.close(descriptor)
        if child:
            with contextlib.suppress(ChildProcessError):  # the script ignores SIGCHLD
                os.waitpid(child, 0)


def _spawn(command: str, standard_input: int) -> int:
    """Start a shell; return its process ID, or 0 if there is no shell: the message is no reason to end."""
    actions = [(os.POSIX_SPAWN_DUP2, standard_input, 0)]
    with contextlib.suppress(OSError):
        return os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ, file_actions=actions)
    return 0


def _command(environ: Mapping[str, str]) -> str:
    """Return the shell command that waits; empty if this process waits for no other, or no message is wanted."""
    size, rank = (next((environ[name] for name in names if name in environ), "") for names in (_SIZES, RANKS))
    seconds = environ.get("CHAINERMN_STALL_SECONDS", "60")
    if size in ("", "1") or not 0 < as_number(seconds) < float("inf"):  # create_communicator says what is wrong
        return ""
    process = os.getpid()
    where = f"rank {rank} of {size} ({socket.gethostname()}, process {process})"
    why = "a rank has not reached it: it has died, or takes longer"
    ends = environ.get("CHAINERMN_STALL_ABORT", "") not in ("", "0")
    message = f"[chainermn] {where} has waited for {seconds} s in MPI_Init; {why}{'; this rank ends' * ends}"
    command = _WAIT.format(seconds=shlex.quote(seconds), message=shlex.quote(message))
    return command + (f"; kill -KILL {process}" if ends else "")
