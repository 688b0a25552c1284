"""The process on a node that outlives the ranks of a supervised job; see :mod:`mn_guard.supervised`.

It holds memory for them, reports to the supervisor how they are doing, and ends the remaining ranks when the supervisor
requests it or is silent for too long. It imports nothing from this package: it is a script, started as ``python -I -S
keeper_process.py DESCRIPTOR HOST PORT TOKEN``.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any

__all__ = ["BEAT_SECONDS", "LONGEST_MESSAGE", "SILENCE_SECONDS"]

LONGEST_MESSAGE = 4096
BEAT_SECONDS = 0.4  # between two messages that say "alive", in either direction
SILENCE_SECONDS = 2.5  # after this time, the other side is regarded as lost
_CONNECT_SECONDS = 5.0
_NO_MESSAGE = (ValueError, KeyError, TypeError, IndexError, RecursionError)


@dataclass
class _Rank:
    """A connected process.

    Attributes:
        name: Its name in messages to the supervisor; ``None`` until it has sent one.
        process: Its process ID.
    """

    process: int
    name: dict[str, int] | None = None


class _Keeper:
    """Listens to the ranks of a node and to the supervisor, until the supervisor is gone.

    Args:
        listening: The socket that ranks connect to.
        supervisor: The connection to the supervisor.
    """

    def __init__(self, listening: socket.socket, supervisor: socket.socket) -> None:
        self._listening = listening
        self._supervisor = supervisor
        self._heard = self._spoken = time.monotonic()
        self._came = b""
        self._kept: tuple[int, int] | None = None  # the ranks' number for their arrays, and the file
        self._ranks: dict[socket.socket, _Rank] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(supervisor, selectors.EVENT_READ)

    def run(self) -> None:
        """Listen until the supervisor is gone, and then end the remaining ranks."""
        try:
            while time.monotonic() - self._heard < SILENCE_SECONDS:
                for key, _ in self._selector.select(BEAT_SECONDS / 2):
                    self._attend(key.fileobj)  # type: ignore[arg-type]
                if time.monotonic() - self._spoken > BEAT_SECONDS:
                    self._tell(op="beat")
        except (OSError, EOFError):
            pass  # the supervisor has ended
        finally:
            self._end(None)

    def _attend(self, ready: socket.socket) -> None:
        if ready is self._listening:
            self._accept()
        elif ready is self._supervisor:
            self._obey()
        else:
            self._answer(ready)

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        process, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():  # all processes can see the address
            connection.close()
            return
        connection.settimeout(SILENCE_SECONDS)
        self._ranks[connection] = _Rank(process)
        self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> None:
        rank = self._ranks[connection]
        try:
            came, files, *_ = socket.recv_fds(connection, LONGEST_MESSAGE, 1)
            if came:
                answer, sent = self._answer_to(came, files, rank)
                socket.send_fds(connection, [json.dumps(answer).encode()], sent)
        except OSError:
            came = b""
        if not came:
            self._selector.unregister(connection)
            connection.close()
            del self._ranks[connection]
            if rank.name is not None:
                self._tell(op="gone", **rank.name)

    def _answer_to(self, came: bytes, files: list[int], rank: _Rank) -> tuple[dict[str, Any], list[int]]:
        """Process what a process has sent; return the answer, and the file that belongs to it."""
        try:
            return self._process(json.loads(came), files, rank)
        except _NO_MESSAGE:  # a mistake of one process must not end the other ranks of the node
            for file in files:
                os.close(file)
            return {}, []

    def _process(self, message: dict[str, Any], files: list[int], rank: _Rank) -> tuple[dict[str, Any], list[int]]:
        if message["op"] == "keep":
            self._keep(message["number"], files[0])
        elif message["op"] == "load":
            if self._kept is not None:
                return {"number": self._kept[0]}, [self._kept[1]]
        else:
            if message["op"] in ("start", "join"):
                rank.name = {key: message[key] for key in ("attempt", "rank")}
            self._tell(**message | (rank.name or {}))
        return {}, []

    def _keep(self, number: int, file: int) -> None:
        """Hold a file instead of the previous one, which is closed only now."""
        before, self._kept = self._kept, (number, file)
        if before is not None:
            os.close(before[1])
        self._tell(op="kept", number=number)

    def _obey(self) -> None:
        came = self._supervisor.recv(1 << 16)
        if not came:
            raise EOFError
        self._heard = time.monotonic()
        *lines, self._came = (self._came + came).split(b"\n")
        for message in map(json.loads, lines):
            if message["op"] == "end":
                self._end(message["attempt"])

    def _end(self, attempt: int | None) -> None:
        """Kill the ranks of an attempt, or all: while a process is connected, its process ID cannot be reused."""
        for rank in self._ranks.values():
            if rank.name is not None and attempt in (None, rank.name["attempt"]):
                os.kill(rank.process, signal.SIGKILL)

    def _tell(self, **message: Any) -> None:
        self._spoken = time.monotonic()
        self._supervisor.sendall(json.dumps(message).encode() + b"\n")


def _main(descriptor: str, host: str, port: str, token: str) -> None:
    os.closerange(3, int(descriptor))
    os.closerange(int(descriptor) + 1, os.sysconf("SC_OPEN_MAX"))
    # First of all, because the rank that has started this waits only until there are two processes.
    try:
        supervisor = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
    except OSError as error:
        where = f"{socket.gethostname()}: the supervisor cannot be reached at {host}, port {port}"
        os.write(2, f"[chainermn] {where}: {error}\n".encode())
        sys.exit(1)
    if os.fork():  # so that the ranks have no child process that they did not start
        os._exit(0)
    os.setsid()  # so that it is not ended with the ranks
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    # A launcher waits for every process that holds the other end of its pipe.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 2)
    supervisor.settimeout(SILENCE_SECONDS)
    supervisor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    greeting = {"op": "keeper", "token": token, "host": socket.gethostname()}
    supervisor.sendall(json.dumps(greeting).encode() + b"\n")
    _Keeper(socket.socket(fileno=int(descriptor)), supervisor).run()


if __name__ == "__main__":
    _main(*sys.argv[1:])
