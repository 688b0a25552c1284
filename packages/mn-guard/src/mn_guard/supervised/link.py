"""How a process of a job connects to the keeper of its node, and how the keeper connects to the supervisor."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from mn_guard.forks import around_forks
from mn_guard.supervised import keeper_process

__all__ = ["VARIABLE", "Connection", "Supervision", "connection", "supervision"]

VARIABLE = "CHAINERMN_SUPERVISOR"
"""What a supervisor sets in the environment of a job: ``HOST PORT TOKEN ATTEMPT``."""
_INHERITED = "CHAINERMN_KEEPER"
"""The variable for a connection that was made before the process became the script: ``DESCRIPTOR PROCESS``."""
_PATIENCE_SECONDS = 5.0
_PAUSE_SECONDS = 0.01
_GONE = "the keeper of this node has ended, probably because the supervisor, chainermn elastic, has ended"


@dataclass(frozen=True)
class Supervision:
    """The supervisor of a job.

    Attributes:
        host: Where the supervisor listens.
        port: The port.
        token: Distinguishes its jobs from all others.
        attempt: How many times the job has been started, including this time.
    """

    host: str
    port: int
    token: str
    attempt: int

    @property
    def address(self) -> str:
        """The address of a node's keeper: a name outside the file system, which disappears with its process."""
        return f"\0chainermn-keeper-{self.token}"

    def __str__(self) -> str:
        return f"{self.host} {self.port} {self.token} {self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Supervision:
        """Return the object for a string that :meth:`__str__` has returned."""
        host, port, token, attempt = text.split()
        return cls(host, int(port), token, int(attempt))


def supervision() -> Supervision | None:
    """Return the supervisor of this job, if there is one."""
    text = os.environ.get(VARIABLE, "")
    return Supervision.parse(text) if text else None


class Connection:
    """A process's connection to the keeper of its node; several threads may use it.

    Args:
        connected: A socket that preserves message boundaries.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        around_forks(after_in_child=connected.close)  # a child process is not a rank

    def pass_on(self) -> None:
        """Leave the connection to the program that this process is about to run in its place."""
        self._socket.set_inheritable(True)
        os.environ[_INHERITED] = f"{self._socket.fileno()} {os.getpid()}"

    def ask(self, message: dict[str, Any], descriptor: int | None = None) -> tuple[dict[str, Any], int | None]:
        """Send a message, optionally with a file, and return the answer, which may also come with a file.

        Raises:
            ConnectionError: The keeper is gone.
        """
        sent = [] if descriptor is None else [descriptor]
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(message).encode()], sent)
                answer, files, *_ = socket.recv_fds(self._socket, keeper_process.LONGEST_MESSAGE, 1)
        except OSError as error:
            raise ConnectionError(f"{_GONE}: {error}") from None
        if not answer:
            raise ConnectionError(_GONE)
        return json.loads(answer), files[0] if files else None


@functools.cache
def connection() -> Connection | None:
    """Return this process's connection to the keeper of its node, which is started if there is none.

    Returns:
        ``None`` if the job is not supervised, or no keeper can run.

    Raises:
        ConnectionError: The keeper has not reached the supervisor.
    """
    found = supervision()
    if found is None or not hasattr(socket, "send_fds"):
        return None
    inherited = _inherited(found.address)
    if inherited is not None:
        return Connection(inherited)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        connected = _connected(found.address)
        if connected is not None:
            return Connection(connected)
        if not _start(found):
            time.sleep(_PAUSE_SECONDS)  # another rank is about to listen there
    return None


def _inherited(address: str) -> socket.socket | None:
    """Return the connection that was made before this process became the script, if it is still open."""
    descriptor, _, process = os.environ.pop(_INHERITED, "").partition(" ")
    if process != str(os.getpid()):  # a process that a rank has started
        return None
    try:
        inherited = socket.socket(fileno=int(descriptor))
    except OSError:  # the script has closed it
        return None
    try:
        is_it = inherited.getpeername() == address.encode()
    except OSError:
        is_it = False
    if is_it:
        inherited.set_inheritable(False)
        return inherited
    inherited.detach()  # the script has closed it, and opened another socket
    return None


def _connected(address: str) -> socket.socket | None:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.connect(address)
        credentials = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] == os.getuid():
            return made
    except OSError:
        pass
    made.close()
    return None


def _start(found: Supervision) -> bool:
    """Start a keeper; return whether no other process has started one in the meantime."""
    status: int | None = None
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(found.address)
        listening.listen(socket.SOMAXCONN)
        os.set_inheritable(listening.fileno(), True)
        options = [str(listening.fileno()), found.host, str(found.port), found.token]
        nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
        command = [sys.executable, "-I", "-S", os.path.abspath(keeper_process.__file__), *options]
        process = os.posix_spawn(sys.executable, command, os.environ, file_actions=nothing)
        status = os.waitpid(process, 0)[1]  # the keeper runs in a child process
    if status:
        raise ConnectionError(f"the supervisor of this job cannot be reached at {found.host}, port {found.port}")
    return status == 0
