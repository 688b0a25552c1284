"""The process on each node: it reports which rank died first, and in a supervised job outlives the ranks.

Its first duty is to report deaths (:mod:`mn_guard.death_reporter`). It also ends what a dead rank has started, if the
others continue, and removes the shared memory that MPI has left behind when the ranks have ended. If the job has a
supervisor (:mod:`mn_guard.supervised`), it also holds memory for the ranks, reports to the supervisor how they are
doing, and ends the remaining ranks when the supervisor requests it or is silent for too long.

It imports nothing from this package: it is a script, started as ``python -I -S node_process.py DESCRIPTOR EXPECTED
[HOST PORT TOKEN]``. The descriptor is of the socket on which it listens. Without a supervisor, it ends with the last of
the expected ranks.

Processes of the node send it JSON objects through that socket, each of which gets an answer. If one has a number,
``asked``, the answer repeats it. ``op`` says what is asked:

==============  =======================================================================================================
``watch``       Report the death of the process: it passes one end of a connection, which ends with it. Through this
                connection, it writes plain text, which is all that a process that crashes can do.
``keep``        Hold a file, instead of the previous one, unless that is of a later attempt or generation: then the
                other ranks have continued without this one.
``load``        Return the file.
anything else   Pass the message on to the supervisor; ``start`` and ``join`` also say which rank the process is. The
                supervisor gets a name of the process with each, because processes that a rank has started may report.
==============  =======================================================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

FINISHED, SPOKEN, EXPLAINED = b"\1", b"\2", b"\3"
LONGEST_MESSAGE = 4096
BEAT_SECONDS = 0.4  # between two messages that say "alive", in either direction
SILENCE_SECONDS = 2.5  # after this time, the other side is regarded as lost
_CONNECT_SECONDS = 5.0
_GRACE_SECONDS = 4.0  # for processes that have received SIGTERM; less than a supervisor waits for the launcher
_DEATH_SECONDS = 1.0  # between the end of a connection and the moment when the process has a status
_PF_EXITING = 0x4  # a flag of the kernel's: the process is about to be dead, and has perhaps closed its files
_PAUSE_SECONDS = 0.0005  # some launchers collect the status immediately
_TOGETHER_SECONDS = 0.5  # the launcher ends the others after the first death
_LAUNCHER_SECONDS = 30.0  # in which the launcher ends the others, on a busy machine
_ARRIVAL_SECONDS = 10.0  # for a rank that is expected, when no other is connected: it may be dead
_MOST_NAMED = 4
_MOST_FILES = 2
_NO_MESSAGE = (ValueError, KeyError, TypeError, IndexError, RecursionError)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_INSTALLED = (f"{_LIBRARY}site-packages", f"{_LIBRARY}dist-packages")


class Rank:
    """What is known about one rank; not a dataclass, because importing these takes as long as starting this process.

    Args:
        rank: Its number in ``MPI_COMM_WORLD``.
        size: How many there are.
        process: Its process ID.
        words: What faulthandler wrote, if it did.

    Attributes:
        leads: Whether its process group is to be ended with it: then what it has started does not outlive it, although
            other ranks continue.
        has_finished: Whether it has reached the end of its program.
        has_explained: Whether it has printed why it ends before that, while the others continue.
        summary: Why it has ended the job, if this is to be printed again.
        state: The state of its process after it has ended: "Z", or empty if the process is gone, or will be.
        status: Its exit status, if the state is "Z".
    """

    def __init__(self, rank: int, size: int, process: int, words: str = "") -> None:
        self.rank = rank
        self.size = size
        self.process = process
        self.words = words
        self.leads = False
        self.has_finished = self.has_explained = False
        self.summary = ""
        self.state, self.status = "?", 0


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


def is_of_script(path: str, name: str, folders: tuple[str, ...]) -> bool:
    """Return whether a function belongs to the script: neither to a library, nor generated by Python.

    The constructor of a named tuple and the methods of a dataclass have no file, as a program of ``python -c``; only
    their names differ from most functions of such a program.

    Args:
        path: Its file, or what Python calls its code if there is no file, for example ``<string>``.
        name: Its name.
        folders: The folders of code that does not belong to the script.
    """
    if path.startswith("<"):
        return not path.startswith("<frozen") and name != "<lambda>" and not name.startswith("__")
    is_python_s_own = path.startswith(_LIBRARY) and not path.startswith(_INSTALLED)
    return not is_python_s_own and not path.startswith(folders)


def _place(words: str, folders: tuple[str, ...]) -> str:
    """Return the script's line in a faulthandler stack, and the operation of this package that it called."""
    operation = ""
    for path, line, name in _FRAME.findall(words):  # the most recent call first
        if path.endswith("/mn_guard/exit_sequence.py"):
            return ", at the end of its program"
        if is_of_script(path, name, folders):
            return f"{operation}, at {path}:{line} in {name}"
        if path.startswith(folders) and "/chainer/" not in path and not path.endswith("watch.py"):
            operation = f" in {name}"
    return operation


def _cause(rank: Rank) -> str:
    """Return how a process ended; empty if it is alive."""
    fatal = re.match(r"Fatal Python error: (.+)", rank.words)
    if fatal:
        return f"died of a fatal error ({fatal[1]})"
    if rank.state == "":
        return "was ended by SIGTERM" if rank.words else "died of a signal, or called os._exit"
    if rank.state != "Z":
        return ""
    number = rank.status & 0x7F
    if not number:
        return (
            f"ended with status {rank.status >> 8} before the end of its program, for example by MPI_Abort or os._exit"
        )
    ended = "was ended" if number == signal.SIGTERM else "was killed"
    # Real-time signals have no names.
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"{ended} by {name}" + (
        " (the system does this when memory has run out)" if number == signal.SIGKILL else ""
    )


def await_deaths(ranks: Sequence[Rank]) -> None:
    """Wait for the exit statuses of ranks whose connections have ended, and note their states.

    A process that is exiting has none for long only if a driver is slow to close its files. All ranks together are
    given a second: meanwhile, a supervisor hears nothing.
    """
    deadline = time.monotonic() + _DEATH_SECONDS
    for rank in ranks:
        rank.state, rank.status = _await_death(rank.process, deadline)


def _await_death(process: int, deadline: float) -> tuple[str, int]:
    while True:
        state, status, flags = _status(process)
        may_exit = flags & _PF_EXITING or not flags  # gVisor shows no flags
        if state in ("Z", "") or not may_exit:
            return state, status
        if time.monotonic() > deadline:
            return "" if flags else state, 0
        time.sleep(_PAUSE_SECONDS)


def end_children(rank: Rank) -> None:
    """End what a dead rank has started: the launcher waits for processes that hold its pipes.

    Those that ignore SIGTERM have some seconds to end: multiprocessing's resource tracker removes shared memory.
    """
    if not rank.leads or rank.has_finished or rank.state not in ("Z", ""):
        return
    with contextlib.suppress(OSError):  # there are none
        os.kill(-rank.process, signal.SIGTERM)
        if not os.fork():
            os.closerange(0, os.sysconf("SC_OPEN_MAX"))
            deadline = time.monotonic() + _GRACE_SECONDS
            with contextlib.suppress(OSError):  # all have ended
                while time.monotonic() < deadline:
                    os.kill(-rank.process, 0)
                    time.sleep(0.05)
                os.kill(-rank.process, signal.SIGKILL)
            os._exit(0)


def _status(process: int) -> tuple[str, int, int]:
    """Return the state of a process, its exit status, and the kernel's flags; an empty state if it is gone."""
    try:
        with open(f"/proc/{process}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", 0, 0
    return fields[0], int(fields[-1]), int(fields[6])


class Group:
    """Ranks of a node that are ended together; their deaths are reported.

    Args:
        expected: The number of ranks.
        host: The name of the host.
        folders: The folders of code that does not belong to the script.
        ends_with_one: Whether the launcher ends the other ranks when one has died. It may take a while.
        errors: The descriptor to write to, which is closed when all ranks have ended: a launcher waits for every
            process that holds the other end of its pipe.

    Attributes:
        shared: The paths and inodes of files that MPI uses as shared memory, and removes if the ranks end normally.
    """

    def __init__(self, expected: int, host: str, folders: Sequence[str], ends_with_one: bool, errors: int) -> None:
        self.folders = tuple(folders)
        self.shared: set[tuple[str, int]] = set()
        self._left = expected
        self._host = host
        self._errors = errors
        self._ends_with_one = ends_with_one
        self._silent_until = 0.0
        self._spoken = self._summarised = False

    def hear(self, rank: Rank, came: bytes) -> None:
        """Note what a rank has sent: the output of faulthandler, and that it has finished or printed its message."""
        rank.has_finished |= FINISHED in came
        rank.has_explained |= EXPLAINED in came
        words, mark, rest = came.strip(FINISHED + EXPLAINED).decode(errors="replace").partition(SPOKEN.decode())
        summary, _, later = rest.partition("\n")
        rank.words += words + later
        if mark:
            self._spoken = True
            rank.summary = summary

    def report(self, rank: Rank) -> bool:
        """Write about a rank that has ended, and return whether other ranks will be ended because of it."""
        if rank.summary and not self._summarised:
            self._summarised = True
            self.write(f"{_name(rank, self._host)} has ended the job: {rank.summary}")
        if self._spoken or time.monotonic() < self._silent_until or rank.has_finished or rank.has_explained:
            return False
        cause = _cause(rank)
        if cause:
            self.write(describe_death(rank, cause, self._host, self.folders))
            if self._ends_with_one:
                self._silent_until = time.monotonic() + _LAUNCHER_SECONDS
        return bool(cause)

    def write(self, line: str) -> None:
        """Write a line to the errors of the job; if they are not read, let another process wait until they are."""
        if not line:
            return
        said = f"[chainermn] {line}\n".encode()
        poll = select.poll()
        poll.register(self._errors, select.POLLOUT)
        with contextlib.suppress(OSError):  # the launcher has ended
            if poll.poll(0):
                os.write(self._errors, said)
            elif not os.fork():
                _write_and_end(self._errors, said)

    def remove(self) -> None:
        """Note that a rank has ended, and been reported."""
        self._left -= 1
        if not self._left:
            self._close()

    def expect_no_more(self) -> None:
        """Note that the ranks that have not come yet never will."""
        if self._left:
            self._left = 0
            self._close()

    def _close(self) -> None:
        os.close(self._errors)
        left = {path for path, inode in self.shared if _inode(path) == inode}
        # Ranks that are not in this group, because they have no communicator, may go on.
        for path in left - _mapped() if left else ():  # nearly always, MPI has removed all
            with contextlib.suppress(OSError):
                os.unlink(path)


def _write_and_end(descriptor: int, said: bytes) -> None:
    """Write to a descriptor, and end this process, which holds nothing else meanwhile."""
    try:
        os.dup2(descriptor, 0)
        os.closerange(1, os.sysconf("SC_OPEN_MAX"))
        os.write(0, said)
    finally:
        os._exit(0)


def _inode(path: str) -> int | None:
    """Return the inode of a file; ``None`` if there is no such file."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino
    return None


def _mapped() -> set[str]:
    """Return the files that processes of this user have in their memory."""
    found = set()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps", errors="replace") as file:
            found |= {line.rstrip("\n").split(" ", 5)[-1].lstrip() for line in file}
    return found


class Incoming:
    """What the other side of a connection sends, in lines, and how long it has been silent while this process ran.

    The time during which this process was stopped does not count: then the other side was probably stopped as well, for
    example by ``scontrol suspend`` or ``docker pause``, or what it has sent has not been read yet.

    Attributes:
        rest: The received beginning of a line.
    """

    def __init__(self) -> None:
        self.rest = b""
        self._seconds = 0.0
        self._looked = time.monotonic()

    def silence(self) -> float:
        """Return the number of seconds without a message; must be called about once in ``BEAT_SECONDS``."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, BEAT_SECONDS)
        self._looked = now
        return self._seconds

    def lines(self, came: bytes) -> list[bytes]:
        """Return the lines that are complete, now that something was received."""
        self._seconds = 0.0
        *lines, self.rest = (self.rest + came).split(b"\n")
        return lines


class _Supervisor:
    """The connection to the supervisor.

    Args:
        connected: The socket.
        token: What the supervisor knows its jobs by.
    """

    def __init__(self, connected: socket.socket, token: str) -> None:
        self.socket = connected
        self._incoming = Incoming()
        self._spoken = time.monotonic()
        connected.settimeout(SILENCE_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.tell(op="keeper", token=token, host=socket.gethostname())

    def beat(self) -> None:
        """Send a sign of life if it is time.

        Raises:
            EOFError: The supervisor has been silent for too long.
        """
        if self._incoming.silence() >= SILENCE_SECONDS:
            raise EOFError
        if time.monotonic() - self._spoken > BEAT_SECONDS:
            self.tell(op="beat")

    def tell(self, **message: Any) -> None:
        """Send a message."""
        self._spoken = time.monotonic()
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived.

        Raises:
            EOFError: The supervisor has ended.
        """
        came = self.socket.recv(1 << 16)
        if not came:
            raise EOFError
        return [json.loads(line) for line in self._incoming.lines(came)]


class _Node:
    """Reports the deaths of the ranks of a node, until all of them have ended.

    With a supervisor, it also holds memory for the ranks, and connects them to the supervisor, until that is gone.

    Args:
        listening: The socket that processes connect to.
        expected: How many ranks will have their deaths reported; 0 if ranks of further attempts may come at any time.
        supervisor: The supervisor, if there is one.
    """

    def __init__(self, listening: socket.socket, expected: int, supervisor: _Supervisor | None) -> None:
        self._listening = listening
        self._expected = expected
        self._supervisor = supervisor
        # The connected processes, each with its name in messages to the supervisor, once it has sent one.
        self._clients: dict[socket.socket, dict[str, Any]] = {}
        self._ends: dict[socket.socket, int] = {}  # descriptors of processes, to notice their ends
        self._groups: dict[str, Group] = {}
        self._gone: list[tuple[Group, Rank]] = []
        self._kept: tuple[int, int] | None = None  # the ranks' number for their arrays, and the file
        self._kept_in: list[int] = []  # the attempt and the generation
        self._happened = False  # whether there was anything at the last look
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ, self._accept)
        if supervisor is not None:
            self._selector.register(supervisor.socket, selectors.EVENT_READ, self._obey)

    def run(self) -> None:
        """Listen until all ranks have ended; or until the supervisor is gone, and then end the remaining ranks."""
        try:
            while self._selector.get_map():
                only_listens = self._only_listens()
                self._report(self._look(_ARRIVAL_SECONDS if only_listens else None))
                if only_listens and not self._happened:
                    self._drop(self._listening)
                    for group in self._groups.values():
                        group.expect_no_more()
        except (OSError, EOFError):
            pass  # the supervisor has ended
        finally:
            self._end(None)

    def _only_listens(self) -> bool:
        """Return whether this waits for nothing but ranks that are to connect."""
        return self._supervisor is None and [*self._selector.get_map()] == [self._listening.fileno()]

    def _look(self, timeout: float | None) -> list[tuple[Group, Rank]]:
        """Wait until something happens, and return the ranks that have ended."""
        if self._supervisor is not None:
            timeout = min(BEAT_SECONDS / 2, timeout or BEAT_SECONDS)
        events = self._selector.select(timeout)
        self._happened = bool(events)
        # The supervisor first: if it has ended the connection, the next attempt's ranks must not be answered.
        for key, _ in sorted(events, key=lambda event: event[0].data != self._obey):
            key.data(key.fileobj)
        gone, self._gone = self._gone, []
        if self._supervisor is not None:
            self._supervisor.beat()
        return gone

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    # Deaths: each rank has a connection that ends with it.

    def _watch(self, message: dict[str, Any], connection: int, *errors: int) -> None:
        """Report the death of a rank, which is when a connection ends; the first rank of a group says where to."""
        name, rank = message["group"], Rank(*(message[key] for key in ("rank", "size", "process")))
        if errors:
            given = (message[key] for key in ("folders", "ends_with_one"))
            self._groups[name] = Group(message["expected"], socket.gethostname(), *given, *errors)
        group = self._groups[name]
        group.shared |= {(path, inode) for path, inode in message.get("shared", [])}
        ends = socket.socket(fileno=connection)
        ends.setblocking(False)
        # In a container, it may have another process ID there.
        rank.leads = bool(message.get("leads")) and peer_of(ends)[0] == rank.process
        hear = partial(self._hear, group, rank)
        self._selector.register(ends, selectors.EVENT_READ, hear)
        self._expected -= 1
        if not self._expected:
            self._drop(self._listening)

    def _hear(self, group: Group, rank: Rank, connection: socket.socket) -> None:
        # To the end, if it is there: when this process is late, ranks that have ended after this one are heard next.
        try:
            while came := connection.recv(1 << 16):
                group.hear(rank, came)
        except BlockingIOError:
            return
        except OSError:
            pass
        self._drop(connection)
        self._gone.append((group, rank))

    def _report(self, gone: list[tuple[Group, Rank]]) -> None:
        """Report deaths, and what the ranks that are ended because of them were doing."""
        reported = self._report_each(gone)
        if reported:
            others = self._next_to_go()
            reported += self._report_each(others)
            gone += others
            for group in {group for group, _ in reported}:
                ended = [rank for other, rank in gone if other is group and (group, rank) not in reported]
                group.write(describe_others(ended, group.folders))
        for group, rank in gone:
            end_children(rank)
            group.remove()

    def _report_each(self, gone: list[tuple[Group, Rank]]) -> list[tuple[Group, Rank]]:
        await_deaths([rank for _, rank in gone if not rank.has_finished])
        return [(group, rank) for group, rank in gone if group.report(rank)]

    def _next_to_go(self) -> list[tuple[Group, Rank]]:
        others: list[tuple[Group, Rank]] = []
        deadline = time.monotonic() + _TOGETHER_SECONDS
        while self._selector.get_map() and (left := deadline - time.monotonic()) > 0:
            others += self._look(left)
        return others

    # Requests: a process sends one message after another, and each gets an answer.

    def _accept(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        if peer_of(connection)[1] != os.getuid():  # all processes can see the address
            connection.close()
            return
        connection.settimeout(SILENCE_SECONDS)
        self._clients[connection] = {}
        self._selector.register(connection, selectors.EVENT_READ, self._answer)

    def _answer(self, connection: socket.socket) -> None:
        if connection not in self._clients:  # its end was noticed a moment ago
            return
        try:
            came, files, *_ = socket.recv_fds(connection, 1 << 16, _MOST_FILES)
            if came:
                answer, sent = self._answer_to(came, files, connection)
                socket.send_fds(connection, [json.dumps(answer).encode()], sent)
        except OSError:
            came = b""
        if not came and connection in self._ends:  # it may only have closed its descriptors
            self._selector.unregister(connection)
        elif not came:
            self._forget(connection)

    def _forget(self, connection: socket.socket, _: object = None) -> None:
        """Report that a process has ended, if it has said which rank it is."""
        self._hear_out(connection)
        with contextlib.suppress(KeyError):  # it has closed its descriptors before
            self._selector.unregister(connection)
        if connection in self._ends:
            end = self._ends.pop(connection)
            self._selector.unregister(end)
            os.close(end)
        name = self._clients.pop(connection)
        connection.close()
        if name and self._supervisor is not None:
            self._supervisor.tell(op="gone", **name)

    def _hear_out(self, connection: socket.socket) -> None:
        """Process what a process has sent before it ended; it has waited for no answer, or not long enough."""
        connection.setblocking(False)
        for _ in range(2):  # the first error may only say that it has not read all answers
            with contextlib.suppress(OSError):
                while (received := socket.recv_fds(connection, 1 << 16, _MOST_FILES))[0]:
                    self._answer_to(*received[:2], connection)

    def _name_of(self, connection: socket.socket) -> str:
        """Return a name for the process at the other end, which remains if it connects again."""
        process = peer_of(connection)[0]
        for other, name in self._clients.items():
            if name and process and peer_of(other)[0] == process:
                return str(name["process"])
        return os.urandom(8).hex()

    def _await_end(self, connection: socket.socket) -> None:
        """Notice the end of a process itself: what it has started may hold its connection, or it may have closed it."""
        # Not possible with an old kernel, or for a process of another container; then the end of the connection counts.
        with contextlib.suppress(OSError, AttributeError):
            self._ends[connection] = os.pidfd_open(peer_of(connection)[0])
            self._selector.register(self._ends[connection], selectors.EVENT_READ, partial(self._forget, connection))

    def _answer_to(
        self, came: bytes, files: list[int], connection: socket.socket
    ) -> tuple[dict[str, Any], Sequence[int]]:
        """Process what a process has sent; return the answer, and the file that belongs to it."""
        answer: dict[str, Any] = {}
        sent: Sequence[int] = ()
        try:
            message = json.loads(came)
            op = message["op"]
            if "asked" in message:
                answer["asked"] = message.pop("asked")
            if op == "watch":
                self._watch(message, *files)
            elif self._supervisor is not None:
                found, sent = self._serve(self._supervisor, message, files, connection)
                answer |= found
        except _NO_MESSAGE:  # a mistake of one process must not end the other ranks of the node
            for file in files:
                os.close(file)
        return answer, sent

    def _serve(
        self, supervisor: _Supervisor, message: dict[str, Any], files: list[int], connection: socket.socket
    ) -> tuple[dict[str, Any], Sequence[int]]:
        """Do what a rank of a supervised job asks for; return the answer, and the file that belongs to it."""
        if message["op"] == "keep" and message["in"] < self._kept_in:
            os.close(files[0])
        elif message["op"] == "keep":
            before, self._kept = self._kept, (message["number"], files[0])
            self._kept_in = message["in"]
            if before is not None:
                os.close(before[1])  # only now
            supervisor.tell(op="kept", number=message["number"])
        elif message["op"] == "load":
            if self._kept is not None:
                return {"number": self._kept[0]}, self._kept[1:]
        else:
            name = self._clients[connection]
            if message["op"] in ("start", "join"):
                if not name:
                    name["process"] = self._name_of(connection)  # what a rank has started reports, too
                    self._await_end(connection)
                name.update({key: message[key] for key in ("attempt", "rank")})
            supervisor.tell(**message | name)
        return {}, ()

    def _obey(self, _: socket.socket) -> None:
        assert self._supervisor is not None
        for message in self._supervisor.hear():
            if message["op"] == "end":
                self._end(message["attempt"])

    def _end(self, attempt: int | None) -> None:
        """Kill the ranks of an attempt, or all: while a process is connected, its process ID cannot be reused."""
        for connection, name in self._clients.items():
            if name and attempt in (None, name["attempt"]):
                with contextlib.suppress(ProcessLookupError):  # it has ended, which has not been read yet
                    os.kill(peer_of(connection)[0], signal.SIGKILL)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process ID and the user at the other end of a connection on this host."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return process, user


def _connect(host: str, port: str) -> socket.socket:
    """Connect to the supervisor; if it cannot be reached, end this process with status 1."""
    try:
        return socket.create_connection((host, int(port)), _CONNECT_SECONDS)
    except OSError as error:
        where = f"{socket.gethostname()}: the supervisor cannot be reached at {host}, port {port}"
        os.write(2, f"[chainermn] {where}: {error}\n".encode())
        sys.exit(1)


def _detach() -> None:
    """Let this process go on when the ranks and the launcher end, and hold nothing that they wait for."""
    if os.fork():  # so that the ranks have no child process that they did not start
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for its children
    os.chdir("/")
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)


def _main(descriptor: str, expected: str, *supervisor: str) -> None:
    # A launcher may consider a rank dead when no process holds a descriptor of it.
    os.closerange(3, int(descriptor))
    os.closerange(int(descriptor) + 1, os.sysconf("SC_OPEN_MAX"))
    # First of all, because the rank that has started this waits only until this process detaches itself.
    connected = _connect(*supervisor[:2]) if supervisor else None
    _detach()
    listening = socket.socket(fileno=int(descriptor))
    supervised_by = None if connected is None else _Supervisor(connected, supervisor[2])
    _Node(listening, int(expected), supervised_by).run()


if __name__ == "__main__":
    _main(*sys.argv[1:])
