"""How a process of a job connects to the keeper of its node, and how the keeper connects to the supervisor."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import socket
import struct
import threading
import time
from typing import Any, NamedTuple

from mn_guard import node, node_process
from mn_guard.forks import around_forks

VARIABLE = "CHAINERMN_SUPERVISOR"
"""What a supervisor sets in the environment of a job: ``HOST PORT TOKEN ATTEMPT``."""
_INHERITED = "CHAINERMN_KEEPER"
"""The variable for a connection that was made before the process became the script: ``DESCRIPTOR PROCESS``."""
_PATIENCE_SECONDS = 5.0
_PAUSE_SECONDS = 0.01
_TIMEOUT = struct.pack("ll", 0, 50_000)  # 50 ms; then a question looks whether it was answered
_GONE = "the keeper of this node has ended, probably because the supervisor, chainermn elastic, has ended"

_Answer = tuple[dict[str, Any], int | None]


class Supervision(NamedTuple):
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


class Connection:
    """A connection to the keeper; several threads may use it, and signal handlers.

    A signal handler may raise while the answer to a question is awaited, or ask something itself. So questions have
    numbers, which the answers repeat.

    Args:
        connected: A socket that preserves message boundaries.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._answers: dict[int, _Answer | None] = {}  # to the questions that are waited for
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT)
        around_forks(after_in_child=connected.close)  # a child process is not a rank

    def ask(self, message: dict[str, Any], *descriptors: int) -> _Answer:
        """Send a message, optionally with files, and return the answer, which may come with a file.

        Raises:
            ConnectionError: The keeper is gone.
        """
        number = next(self._numbers)
        try:
            with self._lock:
                self._answers[number] = None
                try:
                    socket.send_fds(self._socket, [json.dumps({"asked": number, **message}).encode()], descriptors)
                    while (answer := self._answers[number]) is None:
                        self._receive()
                    return answer
                finally:
                    del self._answers[number]
        except EOFError:
            raise ConnectionError(_GONE) from None
        except OSError as error:
            raise ConnectionError(f"{_GONE}: {error}") from None

    def _receive(self) -> None:
        """Receive an answer if one comes soon."""
        try:
            came, files, *_ = socket.recv_fds(self._socket, node_process.LONGEST_MESSAGE, 1)
        except BlockingIOError:  # a signal handler that asks may have received it
            return
        if not came:
            raise EOFError
        answer = json.loads(came)
        number = answer.pop("asked")
        if number in self._answers:
            self._answers[number] = answer, files[0] if files else None
        else:  # an exception of a signal handler has ended the wait
            for file in files:
                os.close(file)

    def pass_on(self) -> None:
        """Leave the connection to the program that this process is about to run in its place."""
        self._socket.set_inheritable(True)
        os.environ[_INHERITED] = f"{self._socket.fileno()} {os.getpid()}"


def supervision() -> Supervision | None:
    """Return the supervisor of this job, if there is one."""
    text = os.environ.get(VARIABLE, "")
    return Supervision.parse(text) if text else None


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
        connected = node.connect(found.address)
        if connected is not None:
            return Connection(connected)
        if not _start(found):
            time.sleep(_PAUSE_SECONDS)  # another rank is about to listen there
    return None


def tell(**message: Any) -> Connection | None:
    """Send a message about this attempt to the keeper; return the connection, ``None`` if there is none.

    Raises:
        ConnectionError: The keeper is gone, or has not reached the supervisor.
    """
    found, connected = supervision(), connection()
    if found is not None and connected is not None:
        connected.ask({"attempt": found.attempt, **message})
    return connected


def _inherited(address: str) -> socket.socket | None:
    """Return the connection that was made before this process became the script, if it is still open."""
    descriptor, _, process = os.environ.pop(_INHERITED, "").partition(" ")
    if process != str(os.getpid()):  # a process that a rank has started
        return None
    try:
        inherited = socket.socket(fileno=int(descriptor))
    except OSError:  # the script has closed it
        return None
    with contextlib.suppress(OSError):
        if inherited.getpeername() == address.encode():
            inherited.set_inheritable(False)
            return inherited
    inherited.detach()  # the script has closed it, and opened another socket
    return None


def _start(found: Supervision) -> bool:
    """Start a node process; return whether no other process has started one in the meantime."""
    listening = node.listen(found.address)
    if listening is None:
        return False
    if node.start(listening, "0", found.host, str(found.port), found.token, is_awaited=True):
        raise ConnectionError(f"the supervisor of this job cannot be reached at {found.host}, port {found.port}")
    return True
