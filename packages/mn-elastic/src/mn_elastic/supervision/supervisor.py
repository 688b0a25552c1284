"""The supervisor: runs attempts, listens to the keepers of nodes, and decides whether to restart."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType
from typing import Any

from mn_elastic.supervision.attempt import Attempt
from mn_elastic.supervision.launch import (
    command_of,
    environment_of,
    left,
    own_address,
    ranks_on,
    remove_session,
    spares_on,
)
from mn_elastic.supervision.options import Host, Options
from mn_guard.abort import is_unread
from mn_guard.job import BY_SIGNAL
from mn_guard.node_process import BEAT_SECONDS, SILENCE_SECONDS, Incoming
from mn_guard.supervised.link import VARIABLE, Supervision
from mn_tools.doctor.mpi import Launcher, find_launcher, identify
from mn_tools.doctor.options import Options as DoctorOptions

_MOST_WITHOUT_PROGRESS = 3
_LAUNCHER_SECONDS = 5.0  # the time for mpiexec to end after all ranks have ended, and what it has written was read
_EXIT_SECONDS = 300.0  # the time for ranks to end after the end of the script, which may have registered functions
_END_SECONDS = 2.0  # between asking mpiexec to end and killing it
_END_SECONDS_WITHOUT_A_HOST = 0.5  # Open MPI's mpiexec then waits for that host
_PAUSE_SECONDS = 0.02  # between two looks at what is about to end
_EARLY_SECONDS = 1.0  # the time for other ranks, and mpiexec, to end after a rank without a communicator has ended
_LATE_SECONDS = 20.0  # after this time, it is said that ranks have not come together
_LITTLE_SHARED_MEMORY = 16 << 20  # bytes; MPICH needs about one for each rank
_LONGEST_LINE = 1 << 16  # bytes: more than a keeper ever sends
_LONGEST_GREETING = 4096
_ASK_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_output = ThreadPoolExecutor(1)  # at exit, Python waits until all was written
_NO_MESSAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class _Keeper(Incoming):
    """The keeper of a node, or a connection that has not identified itself yet.

    Attributes:
        host: The node; empty until the keeper has sent it.
    """

    host = ""


class _Lasting:
    """Measures for how long a state has lasted."""

    def __init__(self) -> None:
        self._state: tuple[object, ...] = ()
        self._since = 0.0

    def seconds(self, *state: object) -> float:
        """Return the number of seconds since the state became this one."""
        now = time.monotonic()
        if state != self._state:
            self._state, self._since = state, now
        return now - self._since


class _Mpiexec(subprocess.Popen[bytes]):
    """The process of ``mpiexec``: until it is waited for, the number of its process group is not given to another."""

    def poll(self) -> int | None:
        """Return its status if it has ended, negative if a signal has ended it; leave it to be waited for."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class _Stopped(Exception):
    """The supervisor was asked to end, by a signal."""


class Supervisor:
    """Runs a job until it has ended, or there is a reason to give up.

    Args:
        options: The command line's settings.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._token = secrets.token_hex(16)
        self._listening = socket.create_server((own_address(options.hosts), 0))
        self._listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self._keepers: dict[socket.socket, _Keeper] = {}
        self._attempt = Attempt(0)  # before the first one, and between two
        self._spoken = 0.0
        self._signal = 0  # the first signal that has asked it to end

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        for keeper in [*self._keepers]:  # they then end the remaining ranks and themselves
            keeper.close()
        self._listening.close()
        self._selector.close()

    def run(self) -> int:
        """Run the job; return the status of the training, or 128 and the number of the signal that has ended it."""
        for each in _ASK_TO_END:
            if signal.getsignal(each) != signal.SIG_IGN:  # as with nohup
                signal.signal(each, self._note)
        # What started this process may have left them otherwise. Then mpiexec would not end when it is asked to, and
        # nobody would learn its status.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASK_TO_END)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Ctrl-Z has no effect: the keepers would end the ranks of a supervisor that is silent.
        signal.signal(signal.SIGTSTP, lambda *_: None)
        try:
            return self._run(_find_launcher(self._options))
        except _Stopped:
            return BY_SIGNAL + self._signal

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. An exception could come at any moment, and leave processes behind."""
        self._signal = self._signal or number

    def _heed(self) -> None:
        """End if a signal has come."""
        if self._signal:
            _say("asked to end: the job ends")
            raise _Stopped

    def _run(self, launcher: Launcher) -> int:
        in_vain = 0
        hosts: Sequence[Host] = self._options.hosts
        for number in range(1, self._options.restarts + 2):
            before = self._attempt.newest
            self._try(number, launcher, hosts)
            attempt = self._attempt
            if attempt.is_finished:
                _say(f"the training is complete{_after(number - 1)}")
                return 0
            in_vain = 1 if attempt.newest > before else in_vain + 1
            _say(
                f"attempt {number} has failed: {'; '.join([*attempt.lost, attempt.reason, *_lack_of_shared_memory()])}"
            )
            self._heed()
            hosts = self._ask_hosts()
            self._heed()
            problem = self._problem(number, in_vain, hosts)
            if problem:
                _say(f"giving up: {problem}")
                return attempt.status
        raise AssertionError("the last attempt has succeeded, or there was a reason to give up")

    def _problem(self, number: int, in_vain: int, hosts: Sequence[Host]) -> str:
        """Return why there can be no further attempt, or an empty result."""
        if number > self._options.restarts:
            return f"it was started {number} times"
        if in_vain >= _MOST_WITHOUT_PROGRESS:
            newest = self._attempt.newest
            what = f"nothing newer than number {newest}" if newest >= 0 else "nothing"
            return f"{in_vain} attempts in a row have failed, and {what} was kept"
        room = ranks_on(self._options, hosts)
        if room < self._options.least:
            return f"there is room for {room} ranks on the hosts that answer, {self._options.least} are needed"
        return ""

    def _try(self, number: int, launcher: Launcher, hosts: Sequence[Host]) -> None:
        """Run one attempt, until all of its processes have ended."""
        self._heed()
        host, port = self._listening.getsockname()[:2]
        said = str(Supervision(host, port, self._token, number))
        environ = {**os.environ, VARIABLE: said, **environment_of(self._options, hosts)}
        where = f" on {', '.join(each.name for each in hosts)}" if hosts else ""
        n_ranks, n_spares = ranks_on(self._options, hosts), spares_on(self._options, hosts)
        self._attempt = Attempt(number, n_ranks + n_spares, newest=self._attempt.newest)
        self._tell(op="end", attempt=number - 1)  # again: its ranks may have reported since then
        waiting = f" and {n_spares} spare{'s' * (n_spares > 1)}" if n_spares else ""
        _say(f"attempt {number}: {n_ranks} ranks{waiting}{where}")
        # In its own session: Ctrl-C is for the supervisor, which then ends mpiexec.
        process = _Mpiexec(
            command_of(self._options, launcher, hosts), stdin=subprocess.DEVNULL, env=environ, start_new_session=True
        )
        try:
            self._watch(process)
            status = process.poll()
            self._attempt.launched = status if status is None or status >= 0 else BY_SIGNAL - status
        finally:
            self._end(process)

    def _ask_hosts(self) -> Sequence[Host]:
        """Return the hosts that can be reached, and give signs of life meanwhile: keepers that hear none end."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(left, self._options, self._listening.getsockname()[:2], frozenset(self._attempt.silent))
            while not wait([asked], _PAUSE_SECONDS).done:
                self._listen(_PAUSE_SECONDS)
        return asked.result()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Listen until the attempt is over: the launcher has ended, a host is lost, or the time has run out."""
        attempt, began, state = self._attempt, time.monotonic(), _Lasting()
        while not attempt.verdict:
            self._heed()
            is_quiet = not self._listen()
            if attempt.lost and not attempt.is_finished:
                return
            has_ended = process.poll() is not None
            # What was sent before the launcher ended may have come since this process listened, if it was delayed.
            if has_ended and is_quiet and not self._listen(0) and not attempt.present:
                return
            limit = self._limit(has_ended)
            if limit is None:
                attempt.verdict = attempt.verdict or self._problem_at_start(time.monotonic() - began)
            if self._is_late(state.seconds(limit, attempt.is_finished), limit):
                if attempt.n_exiting and attempt.trains_in_children:  # their scripts would have continued
                    attempt.verdict = "programs that ranks have started have not ended after the end of the training"
                return

    def _limit(self, has_ended: bool) -> float | None:
        """Return how long the attempt may remain as it is; ``None`` if it has not come to its end.

        Args:
            has_ended: Whether the launcher has ended.
        """
        attempt = self._attempt
        if attempt.is_finished and attempt.n_exiting:
            return _EXIT_SECONDS
        if has_ended:
            return _LAUNCHER_SECONDS
        if attempt.is_finished and (attempt.continues or _is_unread()):
            return None
        if attempt.is_finished and attempt.trains_in_children:
            return _EXIT_SECONDS  # only the launcher knows how the ranks have ended
        return _LAUNCHER_SECONDS if attempt.is_over or attempt.is_finished else None

    def _is_late(self, seconds: float, limit: float | None) -> bool:
        """Return whether the attempt must end now; say once that its end takes long.

        Args:
            seconds: For how long it has been as it is.
            limit: For how long it may.
        """
        attempt = self._attempt
        if limit is None and attempt.is_finished and seconds > _LATE_SECONDS:
            why = "ranks continue" if attempt.continues else "its output is not read"
            self._say_that_it_still_ends(f"it has come to its end, but {why}")
        elif limit == _EXIT_SECONDS and seconds > _LAUNCHER_SECONDS:
            who = f"{attempt.n_exiting} ranks have" if attempt.n_exiting else "mpiexec has"
            self._say_that_it_still_ends(f"{who} not ended after the end of the training; it ends after {limit:g} s")
        return limit is not None and seconds > limit

    def _say_that_it_still_ends(self, why: str) -> None:
        if not self._attempt.has_said_ending:
            self._attempt.has_said_ending = True
            _say(f"attempt {self._attempt.number}: {why}")

    def _problem_at_start(self, seconds: float) -> str:
        """Return why ranks will not come together, or an empty result; say once that they have not, so far."""
        attempt = self._attempt
        if attempt.is_together:
            return ""
        if not attempt.problem_at_start:
            attempt.early_since = None
        else:
            attempt.early_since = seconds if attempt.early_since is None else attempt.early_since
            return attempt.problem_at_start if seconds - attempt.early_since > _EARLY_SECONDS else ""
        limit = self._options.start_limit
        found = f"{len(attempt.joined)} of {attempt.expected} ranks have made a communicator"
        if seconds > limit:
            return f"{found} within {limit:g} s (--start-limit)"
        if seconds > _LATE_SECONDS and not attempt.has_said_late:
            attempt.has_said_late = True
            _say(f"attempt {attempt.number}: {found} after {_LATE_SECONDS:g} s; it ends at {limit:g} s (--start-limit)")
        return ""

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End the remaining processes of an attempt, on all hosts whose keepers respond."""
        if process.poll() is None:
            process.terminate()  # this ends its ranks
            deadline = time.monotonic() + (_END_SECONDS_WITHOUT_A_HOST if self._attempt.lost else _END_SECONDS)
            while process.poll() is None and time.monotonic() < deadline:
                self._listen(_PAUSE_SECONDS)  # and speak to the keepers, which would end otherwise
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._tell(op="end", attempt=self._attempt.number)
        deadline = time.monotonic() + _END_SECONDS
        while self._may_hear_of_ranks() and time.monotonic() < deadline:
            self._listen()
        if process.returncode < 0:
            remove_session(process.pid)

    def _may_hear_of_ranks(self) -> bool:
        heard = {keeper.host for keeper in self._keepers.values()}
        return not heard.isdisjoint(self._attempt.present.values())

    def _listen(self, seconds: float = BEAT_SECONDS / 4) -> bool:
        """Wait a moment for events, handle them, and give a sign of life; return whether there were any events."""
        happened = self._selector.select(seconds)
        for key, _ in happened:
            key.data(key.fileobj)
        now = time.monotonic()
        if now - self._spoken > BEAT_SECONDS:
            self._spoken = now
            self._tell(op="beat")
        for connection, keeper in [*self._keepers.items()]:
            if keeper.silence() > SILENCE_SECONDS:
                if keeper.host:
                    self._attempt.silent.add(keeper.host)
                self._lose(connection, "nothing was heard of it")
        return bool(happened)

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            connection.settimeout(SILENCE_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ, self._hear)
            self._keepers[connection] = _Keeper()

    def _hear(self, connection: socket.socket) -> None:
        keeper = self._keepers.get(connection)
        if keeper is None:  # it was lost a moment ago, when something was sent to it
            return
        try:
            came = connection.recv(1 << 16)
        except OSError:
            came = b""
        if not came:
            self._lose(connection, "its keeper has ended")
            return
        lines = keeper.lines(came)
        if len(keeper.rest) > (_LONGEST_LINE if keeper.host else _LONGEST_GREETING):
            self._lose(connection, f"it has sent a line of more than {_LONGEST_LINE} bytes")
            return
        for line in lines:
            if keeper.host:
                self._pass_on(line, keeper.host)
                continue
            keeper.host = self._host_in(line)
            if not keeper.host:
                self._lose(connection, "")  # not one of our keepers: a port scanner, for example
                return

    def _pass_on(self, line: bytes, host: str) -> None:
        """Pass a message of a keeper on to the attempt. A wrong one is no reason to end the training."""
        try:
            message = json.loads(line)
            self._attempt.hear(message, host)
            if message["op"] in ("start", "join") and message["attempt"] != self._attempt.number:
                self._tell(op="end", attempt=message["attempt"])  # its launcher was killed before it had reported
        except _NO_MESSAGE as error:
            _say(f"expected a message from the keeper of {host}, got {line[:80]!r}: {type(error).__name__}")

    def _host_in(self, greeting: bytes) -> str:
        """Return the host of a keeper that greets; empty if the line is anything but a correct greeting."""
        if len(greeting) > _LONGEST_GREETING:
            return ""
        try:
            message = json.loads(greeting)
            op, token, host = message["op"], message["token"], message["host"]
            # As bytes, because it refuses to compare text that is not ASCII.
            is_ours = op == "keeper" and secrets.compare_digest(token.encode(), self._token.encode())
        except _NO_MESSAGE:
            return ""
        return host if is_ours and isinstance(host, str) else ""

    def _lose(self, connection: socket.socket, why: str) -> None:
        """Drop a connection; if it was a keeper, its node is lost, unless the ranks are on others."""
        keeper = self._keepers.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        if keeper.host and self._attempt.may_need(keeper.host):
            self._attempt.lost.append(f"{keeper.host} is lost: {why}")
            self._attempt.forget(keeper.host)

    def _tell(self, **message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        for connection in [each for each, keeper in self._keepers.items() if keeper.host]:
            try:
                connection.sendall(line)
            except OSError:
                self._lose(connection, "its keeper has ended")


def _find_launcher(options: Options) -> Launcher:
    if options.mpiexec[0] == "mpiexec":
        launcher, check = find_launcher(DoctorOptions())
        found = launcher or check.found
    else:
        found = identify(options.mpiexec[0], DoctorOptions().seconds)
    if isinstance(found, str):
        raise SystemExit(f"expected a launcher, {options.mpiexec[0]}: {found}")
    for name, value in (("--spares", options.spares), ("--detect", options.detect)):
        if value and found.family != "Open MPI":
            raise SystemExit(
                f"expected Open MPI's mpiexec with {name} {value:g}, got {found.family}'s ({found.path}): its ranks "
                f"cannot continue after a rank has died; omit {name}, and the job is restarted after a failure"
            )
    return found


def _is_unread() -> bool:
    """Return whether the reader of this command's output, which ``mpiexec`` writes, has not read all of it."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if is_unread(descriptor):
                return True
    return False


def _lack_of_shared_memory(folder: str = "/dev/shm") -> list[str]:
    """Say that this host has little shared memory left, if so: MPI libraries then end ranks without naming a reason."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # not on every system
        return []
    return [f"{folder} has only {free / 2**20:.1f} MiB left"] if free < _LITTLE_SHARED_MEMORY else []


def _after(restarts: int) -> str:
    return f", after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""


def _say(text: str) -> None:
    """Write a line in a thread: keepers, which end when they hear nothing, do not wait until somebody reads it."""
    _output.submit(_write, f"[chainermn elastic] {text}\n")


def _write(line: str) -> None:
    if sys.stderr is None:  # it was closed
        return
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except OSError:  # nobody reads it any more, and the training continues
        sys.stderr = None
