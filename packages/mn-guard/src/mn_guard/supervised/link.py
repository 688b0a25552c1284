"""How a process of a job connects to the keeper of its node, and how the keeper connects to the supervisor."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from typing import NamedTuple

from mn_guard import node
from mn_guard.node import Connection

__all__ = ["VARIABLE", "Supervision", "connection", "pass_on", "supervision"]

VARIABLE = "CHAINERMN_SUPERVISOR"
"""What a supervisor sets in the environment of a job: ``HOST PORT TOKEN ATTEMPT``."""
_INHERITED = "CHAINERMN_KEEPER"
"""The variable for a connection that was made before the process became the script: ``DESCRIPTOR PROCESS``."""
_PATIENCE_SECONDS = 5.0
_PAUSE_SECONDS = 0.01
_GONE = "the keeper of this node has ended, probably because the supervisor, chainermn elastic, has ended"


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
        return Connection(inherited, _GONE)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        connected = node.connect(found.address)
        if connected is not None:
            return Connection(connected, _GONE)
        if not _start(found):
            time.sleep(_PAUSE_SECONDS)  # another rank is about to listen there
    return None


def pass_on(connected: Connection) -> None:
    """Leave a connection to the program that this process is about to run in its place."""
    os.environ[_INHERITED] = f"{connected.pass_on()} {os.getpid()}"


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
    listening = node.listen(found.address) if node.can_start() else None
    if listening is None:
        return False
    if node.start(listening, "0", found.host, str(found.port), found.token, is_awaited=True):
        raise ConnectionError(f"the supervisor of this job cannot be reached at {found.host}, port {found.port}")
    return True
