"""A process on each node that reports which rank died first, and how; see :mod:`mn_guard.witness`.

It imports nothing from this package. It is a script, started as ``python -I -S witness_process.py DESCRIPTOR RANKS HOST
FOLDER...``; the folders contain code that does not belong to the user's script.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FINISHED", "SPOKEN", "Rank", "describe_death", "describe_others"]

FINISHED, SPOKEN = b"\1", b"\2"
_DEATH_SECONDS = 0.2  # between the end of the connection and the moment when the process has a status
_PAUSE_SECONDS = 0.0005  # some launchers collect the status immediately
_TOGETHER_SECONDS = 0.5  # the launcher ends the others after the first death
_MOST_NAMED = 4
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass
class Rank:
    """What is known about one rank.

    Attributes:
        rank: Its number in ``MPI_COMM_WORLD``.
        size: How many there are.
        process: Its process ID.
        words: What faulthandler wrote, if it did.
        has_finished: Whether it has reached the end of its program.
        summary: Why it has ended the job, if this is to be printed again.
    """

    rank: int
    size: int
    process: int
    words: str = ""
    has_finished: bool = False
    summary: str = ""


def describe_death(rank: Rank, cause: str, host: str, folders: tuple[str, ...]) -> str:
    """Return the line about a rank that died first.

    Args:
        rank: The rank.
        cause: How it ended.
        host: The host.
        folders: The folders of code that does not belong to the script.
    """
    return f"{_name(rank, host)} {cause}{_place(rank.words, folders)}"


def describe_others(others: Sequence[Rank], folders: tuple[str, ...]) -> str:
    """Return the line about the ranks that ended next, and what they were doing, or an empty string."""
    shown = [f"rank {rank.rank}{_place(rank.words, folders)}" for rank in others if rank.words]
    rest = f"; and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    return f"meanwhile: {'; '.join(shown[:_MOST_NAMED])}{rest}" if shown else ""


def _name(rank: Rank, host: str) -> str:
    return f"rank {rank.rank} of {rank.size} ({host}, process {rank.process})"


def _place(words: str, folders: tuple[str, ...]) -> str:
    """Return the script's line in a faulthandler stack, and the operation of this package that it called."""
    frames = _FRAME.findall(words)
    library = os.path.dirname(os.__file__) + os.sep
    installed = (f"{library}site-packages", f"{library}dist-packages")
    operation = ""
    for path, line, name in frames:  # the most recent call first
        if path.startswith(folders):
            is_operation = "/chainer/" not in path and not path.endswith("watch.py")
            operation = f" in {name}" if is_operation else operation
        elif not path.startswith(("<frozen", library)) or path.startswith(installed):
            return f"{operation}, at {path}:{line} in {name}"
    return operation


def _cause(rank: Rank) -> str:
    """Return how a process ended; empty if it is alive."""
    fatal = re.match(r"Fatal Python error: (.+)", rank.words)
    if fatal:
        return f"died of a fatal error ({fatal[1]})"
    deadline = time.monotonic() + _DEATH_SECONDS
    while True:
        state, status = _status(rank.process)
        if state == "Z":
            break
        if state == "":
            return "was ended by SIGTERM" if rank.words else "died of a signal, or called os._exit"
        if time.monotonic() > deadline:
            return ""
        time.sleep(_PAUSE_SECONDS)
    number = status & 0x7F
    if not number:
        return f"ended with status {status >> 8} before the end of its program, for example by MPI_Abort or os._exit"
    ended = "was ended" if number == signal.SIGTERM else "was killed"
    return f"{ended} by {signal.Signals(number).name}" + (
        " (the system does this when memory has run out)" if number == signal.SIGKILL else ""
    )


def _status(process: int) -> tuple[str, int]:
    """Return the state of a process and its exit status; an empty state if it is gone."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[-1])


class _Witness:
    """Listens to the ranks of a node until the last of them has ended.

    Args:
        listening: The socket that they connect to.
        expected: The number of ranks that will connect.
        host: The name of the host.
        folders: The folders of code that does not belong to the script.
    """

    def __init__(self, listening: socket.socket, expected: int, host: str, folders: tuple[str, ...]) -> None:
        self._expected = expected
        self._host = host
        self._folders = folders
        self._listening = listening
        self._spoken = self._summarised = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def run(self) -> None:
        """Report deaths until all ranks have ended."""
        while self._selector.get_map():
            gone = self._look(None)
            if any([self._report(rank) for rank in gone]):
                _write(describe_others(self._next_to_go(), self._folders))

    def _report(self, rank: Rank) -> bool:
        """Write about a rank that has ended, and return whether other ranks will be ended because of it."""
        if rank.summary and not self._summarised:
            self._summarised = True
            _write(f"{_name(rank, self._host)} has ended the job: {rank.summary}")
        if self._spoken or rank.has_finished:
            return False
        cause = _cause(rank)
        if cause:
            _write(describe_death(rank, cause, self._host, self._folders))
        return bool(cause)

    def _next_to_go(self) -> list[Rank]:
        others: list[Rank] = []
        deadline = time.monotonic() + _TOGETHER_SECONDS
        while self._selector.get_map() and time.monotonic() < deadline:
            others += self._look(deadline - time.monotonic())
        return others

    def _look(self, timeout: float | None) -> list[Rank]:
        """Wait until something happens, and return the ranks that have ended."""
        gone = []
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listening:
                self._accept()
                continue
            connection: socket.socket = key.fileobj  # type: ignore[assignment]
            try:
                came = connection.recv(1 << 16)
            except OSError:
                came = b""
            if came:
                self._hear(key.data, came)
            else:
                self._selector.unregister(connection)
                connection.close()
                gone.append(key.data)
        return gone

    def _hear(self, rank: Rank, came: bytes) -> None:
        rank.has_finished |= FINISHED in came
        words, mark, summary = came.strip(FINISHED).decode(errors="replace").partition(SPOKEN.decode())
        rank.words += words
        if mark:
            self._spoken = True
            rank.summary = summary

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():  # all processes can see the address
            connection.close()
            return
        with connection.makefile("rb", buffering=0) as file:
            rank, size, process = map(int, file.readline().split())
        self._selector.register(connection, selectors.EVENT_READ, Rank(rank, size, process))
        self._expected -= 1
        if not self._expected:
            self._selector.unregister(self._listening)
            self._listening.close()


def _write(line: str) -> None:
    if line:
        os.write(2, f"[chainermn] {line}\n".encode())


def _close_all_but(kept: int) -> None:
    """Close inherited descriptors: a launcher may consider a rank dead when no process holds a descriptor of it."""
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _main(descriptor: str, expected: str, host: str, *folders: str) -> None:
    if os.fork():  # so that the ranks have no child process that they did not start
        os._exit(0)
    os.setsid()  # so that it is not ended with the ranks
    _close_all_but(int(descriptor))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    _Witness(socket.socket(fileno=int(descriptor)), int(expected), host, folders).run()


if __name__ == "__main__":
    _main(*sys.argv[1:])
