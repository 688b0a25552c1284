"""How a process of a job starts the process of its node, and connects to it; see :mod:`mn_guard.node_process`."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from mn_guard import node_process

_SHELL = "/bin/sh"


def connect(address: str) -> socket.socket | None:
    """Return a socket connected to the process at an address; ``None`` if there is none of this user's."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):
        made.connect(address)
        if node_process.peer_of(made)[1] == os.getuid():
            return made
    made.close()
    return None


def listen(address: str) -> socket.socket | None:
    """Return a socket that listens at an address, to which processes may connect from now on.

    Args:
        address: A name outside the file system, which disappears with the process.

    Returns:
        ``None`` if it cannot be: another process listens there, or none could be started, because Python does not know
        its executable, or there is no shell.
    """
    if not sys.executable or not all(os.access(path, os.X_OK) for path in (sys.executable, _SHELL)):
        return None
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
        The status of the process then, 0 if it goes on; 0 if it is not awaited, or the program has collected it.
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
        with contextlib.suppress(ChildProcessError):  # the program ignores SIGCHLD, or waits for all its children
            return os.waitpid(process, 0)[1]  # it continues in a child process
        return 0
