"""How a process of a job starts the process of its node, and connects to it; see :mod:`mn_guard.node_process`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from typing import Any

from mn_guard import node_process
from mn_guard.forks import around_forks

__all__ = ["Connection", "can_start", "connect", "listen", "start"]

_GONE = "the process of this node has ended"
_SHELL = "/bin/sh"


class Connection:
    """A connection to the process of the node; several threads may use it.

    Args:
        connected: A socket that preserves message boundaries.
        gone: What an error says if the other end is gone.
    """

    def __init__(self, connected: socket.socket, gone: str = _GONE) -> None:
        self._socket = connected
        self._gone = gone
        self._lock = threading.Lock()
        around_forks(after_in_child=connected.close)  # a child process is not a rank

    def ask(self, message: dict[str, Any], *descriptors: int) -> tuple[dict[str, Any], int | None]:
        """Send a message, optionally with files, and return the answer, which may come with a file.

        Raises:
            ConnectionError: The process is gone.
        """
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
                answer, files, *_ = socket.recv_fds(self._socket, node_process.LONGEST_MESSAGE, 1)
        except OSError as error:
            raise ConnectionError(f"{self._gone}: {error}") from None
        if not answer:
            raise ConnectionError(self._gone)
        return json.loads(answer), files[0] if files else None

    def pass_on(self) -> int:
        """Return the descriptor, which stays open in the program that this process runs in its place."""
        self._socket.set_inheritable(True)
        return self._socket.fileno()


def connect(address: str) -> socket.socket | None:
    """Return a socket connected to the process at an address; ``None`` if there is none of this user's."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):
        made.connect(address)
        if node_process.peer_of(made)[1] == os.getuid():
            return made
    made.close()
    return None


def can_start() -> bool:
    """Return whether a process could be started: Python knows its executable, and there is a shell."""
    return bool(sys.executable) and all(os.access(path, os.X_OK) for path in (sys.executable, _SHELL))


def listen(address: str) -> socket.socket | None:
    """Return a socket that listens at an address, to which processes may connect from now on.

    Args:
        address: A name outside the file system, which disappears with the process.

    Returns:
        ``None`` if it cannot be, for example because another process listens there.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(address)
        listening.listen(socket.SOMAXCONN)
    except OSError:
        listening.close()
        return None
    return listening


def start(listening: socket.socket, *options: str, is_awaited: bool = False) -> int:
    """Start the process, and leave a socket to it.

    Args:
        listening: The socket that listens; it is closed here.
        options: The options of the script, after the descriptor.
        is_awaited: Whether to wait until the process detaches itself, which takes as long as starting Python.

    Returns:
        The status of the process then, 0 if it goes on; 0 if it is not awaited.
    """
    with listening:
        os.set_inheritable(listening.fileno(), True)
        nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
        script = os.path.abspath(node_process.__file__)
        command = [sys.executable, "-I", "-S", script, str(listening.fileno()), *options]
        if not is_awaited:  # the shell ends at once, so that there is no child process that must be waited for
            command = [_SHELL, "-c", '"$@" &', "sh", *command]
        # In a session of its own at once: a launcher that ends the ranks kills their process groups.
        process = os.posix_spawn(command[0], command, os.environ, file_actions=nothing, setsid=True)
        return os.waitpid(process, 0)[1]  # it continues in a child process
