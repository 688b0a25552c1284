"""Reporting which rank died first: no rank can report its own death, and launchers often do not name the right one.

A rank that is killed, or calls ``os._exit``, prints nothing, and the launcher ends the others immediately. MPICH's
launcher then prints the ID of a process, which may not be the first one, and no rank. So the ranks of a node are
connected to one small process, :mod:`mn_guard.witness_process`. It reads what faulthandler writes about fatal errors
and SIGTERM, notices when connections end, and prints one line about the first rank that died, and one about what the
others were doing. It ends when all of them have ended. ``CHAINERMN_WITNESS=0`` in the environment keeps it from being
started.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mn_guard.exit_sequence import Step, at_exit
from mn_guard.forks import around_forks

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["connect", "has_spoken"]

_connection: socket.socket | None = None
_is_asked = False


def connect(within: Ranks, rank: int, size: int, folders: Sequence[str]) -> socket.socket | None:
    """Connect this process to its node's witness, which is started if there is none; collective within the node.

    Args:
        within: The ranks of the node.
        rank: The rank of this process in ``MPI_COMM_WORLD``.
        size: How many there are.
        folders: The folders of code that does not belong to the script.

    Returns:
        The connection, to write last words to; ``None`` if there is none.
    """
    global _connection, _is_asked
    from mn_guard.witness_process import FINISHED

    lacking = [each for each, asked in enumerate(within.allgather(_is_asked)) if not asked]
    if not lacking:
        return _connection
    is_first = within.rank == lacking[0]
    address = _start(len(lacking), folders) if is_first and _is_wanted() else None
    addresses = within.allgather(address)
    if _is_asked:
        return _connection
    _is_asked = True
    if addresses[lacking[0]] is not None:
        _connection = _connected(addresses[lacking[0]], f"{rank} {size} {os.getpid()}\n")
    if _connection is not None:
        around_forks(after_in_child=_forget)
        at_exit(Step.FINISHED, functools.partial(_say, FINISHED))
    return _connection


def has_spoken(summary: str) -> None:
    """Tell the witness that this rank has printed its message, and is about to end the other ranks.

    Args:
        summary: The message in one line: for Open MPI, which writes twenty lines of its own after it.
    """
    from mn_guard.witness_process import SPOKEN

    _say(SPOKEN + (summary.encode(errors="replace") if _is_open_mpi() else b""))


def _is_wanted() -> bool:
    """Return the setting in the environment of the rank that would start the witness."""
    return os.environ.get("CHAINERMN_WITNESS") != "0"


def _is_open_mpi() -> bool:
    from mn_comm.basis.mpi import MPI

    return MPI.Get_library_version().startswith("Open MPI")


def _start(expected: int, folders: Sequence[str]) -> str | None:
    """Start a witness for some ranks of this node; return its address, or ``None``."""
    from mn_guard import witness_process

    address = f"\0chainermn-{os.urandom(16).hex()}"  # not by `secrets`: a script may have a file secrets.py
    with contextlib.suppress(Exception), socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(expected)
        os.set_inheritable(listening.fileno(), True)
        script = os.path.abspath(witness_process.__file__)
        options = [str(listening.fileno()), str(expected), socket.gethostname(), *folders]
        nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
        command = [sys.executable, "-I", "-S", script, *options]
        process = os.posix_spawn(sys.executable, command, os.environ, file_actions=nothing)
        if os.waitpid(process, 0)[1] == 0:  # the witness runs in a child process
            return address
    return None


def _connected(address: str, greeting: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
        connection.sendall(greeting.encode())
    except OSError:
        connection.close()
        return None
    return connection


def _say(what: bytes) -> None:
    if _connection is not None:
        with contextlib.suppress(OSError):
            _connection.sendall(what)


def _forget() -> None:
    """Leave the connection to the parent: a child process is not a rank."""
    global _connection
    if _connection is not None:
        _connection.close()
        _connection = None
