"""Reporting which rank died first: no rank can report its own death, and launchers often do not name the right one.

A rank that is killed, or calls ``os._exit``, prints nothing, and the launcher ends the others immediately. MPICH's
launcher then prints the ID of a process, which may not be the first one, and no rank. So the ranks of a node are
connected to one small process, :mod:`mn_guard.node_process`. It reads what faulthandler writes about fatal errors
and SIGTERM, notices when connections end, and prints one line about the first rank that died, and one about what the
others were doing. It ends when all of them have ended. ``CHAINERMN_WITNESS=0`` in the environment keeps it from being
started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mn_guard import node
from mn_guard.exit_sequence import Step, at_exit
from mn_guard.forks import around_forks, one_fork
from mn_guard.job import is_tolerant, leads_its_processes
from mn_guard.node_process import EXPLAINED, FINISHED, LONGEST_MESSAGE, SPOKEN
from mn_guard.supervised import link

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

_STDERR = 2
_PATIENCE_SECONDS = 5.0
# MPICH makes one for each node, Open MPI one for each rank, in MPI_Init. If ranks are killed, nobody removes them.
_SHARED_MEMORY = re.compile(r" (\d+) +(/dev/shm/(?:mpich_shm_|sm_segment\.)\S+)$", re.MULTILINE)

_connection: socket.socket | None = None
_is_asked = False


def connect(within: Ranks, rank: int, size: int, folders: Callable[[], Sequence[str]]) -> socket.socket | None:
    """Have this process's death reported by the process of the node; collective within the node.

    Args:
        within: The ranks of the node.
        rank: The rank of this process in ``MPI_COMM_WORLD``.
        size: How many there are.
        folders: Returns the folders of code that does not belong to the script; called on one rank of the node.

    Returns:
        The connection, to write last words to; ``None`` if there is none.
    """
    global _connection, _is_asked
    lacking = [each for each, asked in enumerate(within.allgather(_is_asked)) if not asked]
    if not lacking:
        return _connection
    me = {"op": "watch", "rank": rank, "size": size, "process": os.getpid(), "shared": _shared_memory()}
    me["leads"] = is_tolerant() and leads_its_processes()
    address = group = listening = None
    introduced: tuple[socket.socket, socket.socket] | None = None
    if within.rank == lacking[0] and os.environ.get("CHAINERMN_WITNESS") != "0":
        address, listening = _address()
        group = os.urandom(16).hex()  # not by `secrets`: a script may have such a file
        me |= {"expected": len(lacking), "folders": list(folders()), "ends_with_one": not is_tolerant()}
        introduced = _introduced(address, me | {"group": group}, *_errors())
    address, group = within.allgather((address, group))[lacking[0]]
    if listening is not None:
        node.start(listening, str(len(lacking)))
    if not _is_asked:
        if within.rank != lacking[0]:
            introduced = _introduced(address, me | {"group": group})
        _connection = _known(introduced)
        if _connection is not None:
            at_exit(Step.FINISHED, has_finished)
    _is_asked = True
    return _connection


def has_spoken(summary: str) -> None:
    """Tell the process of the node that this rank has printed its message, and is about to end the other ranks.

    Args:
        summary: The message in one line: for Open MPI, which writes twenty lines of its own after it.
    """
    from mn_comm.basis.mpi import MPI

    is_open_mpi = MPI.Get_library_version().startswith("Open MPI")
    _say(SPOKEN + (summary.encode(errors="replace") + b"\n" if is_open_mpi else b""))


def has_finished() -> None:
    """Tell the process of the node that this rank has reached the end of its program."""
    _say(FINISHED)


def has_explained() -> None:
    """Tell the process of the node that this rank has printed why it ends, and the others continue."""
    _say(EXPLAINED)


def _address() -> tuple[str | None, socket.socket | None]:
    """Return the address of the process of this node; and what will listen there, if it is still to be started."""
    supervised = link.supervision()
    if supervised is not None:
        return supervised.address, None
    address = f"\0chainermn-{os.urandom(16).hex()}"
    listening = node.listen(address)
    return (None, None) if listening is None else (address, listening)


def _shared_memory() -> list[tuple[str, int]]:
    """Return the paths and inodes of the files that MPI uses as shared memory in this process."""
    with contextlib.suppress(OSError), open("/proc/self/maps", errors="replace") as file:
        return sorted({(path, int(inode)) for inode, path in _SHARED_MEMORY.findall(file.read())})
    return []


def _errors() -> list[int]:
    """Return the descriptor of stderr."""
    with contextlib.suppress(OSError):
        os.fstat(_STDERR)
        return [_STDERR]
    return []


def _introduced(
    address: str | None, message: dict[str, Any], *errors: int
) -> tuple[socket.socket, socket.socket] | None:
    """Tell the process of the node who this is.

    Whoever connects first is heard first, even if the process does not run yet.

    Returns:
        The connection that is to end with this process, and the one on which the answer comes; ``None`` if there is no
        process to come.
    """
    global _connection
    asking = node.connect(address) if address is not None else None
    if asking is None:
        return None
    with one_fork:  # a child that another thread forks would hold the connection beyond the end of this process
        here, there = socket.socketpair()
        _connection = here
    with there:
        try:
            socket.send_fds(asking, [json.dumps(message).encode()], [there.fileno(), *errors])
        except OSError:
            _forget()
            asking.close()
            return None
    return here, asking


def _known(introduced: tuple[socket.socket, socket.socket] | None) -> socket.socket | None:
    """Wait until the process of the node has answered; return the connection that is to end with this process.

    If a rank died before that, it would not be known which one died first. This wait leaves the core to the process.
    """
    if introduced is None:
        return None
    connection, asking = introduced
    with asking, contextlib.suppress(OSError):
        asking.settimeout(_PATIENCE_SECONDS)
        asking.recv(LONGEST_MESSAGE)
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


around_forks(after_in_child=_forget)
