"""The keeper of a node, with a supervisor and ranks that the tests imitate."""

import contextlib
import fcntl
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mn_elastic.memory import NodeMemory
from mn_guard import death_reporter, node_process
from mn_guard.supervised import link, report
from mn_guard.supervised import start as start_of_a_rank

JOIN = {"op": "join", "attempt": 1, "rank": 3, "size": 4}
HANGS_SECONDS = 60  # whoever has not come or ended by then never will


class Supervisor:
    """An object that a keeper accepts as its supervisor; a thread sends the signs of life, however slow a test is."""

    def __init__(self):
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(HANGS_SECONDS)
        self.token = secrets.token_hex(8)
        self._came = b""
        self._sending = threading.Lock()
        self._is_silent = threading.Event()

    def __str__(self):
        return str(link.Supervision("127.0.0.1", self.listening.getsockname()[1], self.token, 1))

    def accept(self):
        self.connection, _ = self.listening.accept()
        self.connection.settimeout(HANGS_SECONDS)
        self.beat()

    def say(self, **message):
        with self._sending:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def beat(self):
        """Send the keeper signs of life from now on."""
        self._is_silent.clear()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def _beat(self):
        with contextlib.suppress(OSError):  # the keeper has ended
            self.say(op="beat")
            while not self._is_silent.wait(node_process.BEAT_SECONDS):
                self.say(op="beat")

    def be_silent(self):
        """Send no more signs of life."""
        self._is_silent.set()
        self._beating.join()

    def hang_up(self):
        """End the connection, when no thread uses it any more."""
        self.be_silent()
        self.connection.close()

    def hear(self, *ops):
        """Return the next message of some kinds; ``process`` is the name of the process that it came from."""
        while True:
            *lines, self._came = self._came.split(b"\n")
            for number, line in enumerate(lines):
                if json.loads(line)["op"] in ops:
                    self._came = b"\n".join([*lines[number + 1 :], self._came])
                    message = json.loads(line)
                    self.process = message.pop("process", None)
                    return message
            came = self.connection.recv(1 << 16)
            assert came
            self._came += came

    def forget(self):
        """Pass over what has come so far."""
        while select.select([self.connection], [], [], 0)[0]:
            assert self.connection.recv(1 << 16)
        self._came = b""

    def close(self):
        self.hang_up()
        self.listening.close()


@pytest.fixture
def supervisor(monkeypatch):
    """A supervisor, with a keeper to which this process is connected."""
    made = Supervisor()
    monkeypatch.setenv(link.VARIABLE, str(made))
    link.connection.cache_clear()
    assert link.connection() is not None
    made.accept()
    yield made
    made.close()
    link.connection.cache_clear()


CHILD = """
import json, sys, time
from mn_guard.supervised import link
for message in sys.argv[1:]:
    link.connection().ask(json.loads(message))
print("joined", flush=True)
time.sleep(60)
"""


def a_rank(*messages):
    """Start a process that sends the keeper a message, and that the keeper may kill."""
    said = map(json.dumps, [JOIN, *messages])
    child = subprocess.Popen([sys.executable, "-c", CHILD, *said], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "joined\n"
    child.stdout.close()
    return child


def test_it_says_who_it_is_and_passes_on_what_ranks_say(supervisor):
    greeting = supervisor.hear("keeper")
    assert greeting == {"op": "keeper", "token": supervisor.token, "host": socket.gethostname()}
    child = a_rank({"op": "finished", "attempt": 1, "elastic": False})
    assert supervisor.hear("join") == JOIN
    assert supervisor.hear("finished") == {"op": "finished", "attempt": 1, "rank": 3, "elastic": False}
    assert supervisor.hear("beat") == {"op": "beat"}
    child.kill()
    assert supervisor.hear("gone") == {"op": "gone", "attempt": 1, "rank": 3}
    child.wait()


def test_what_a_rank_has_started_has_another_name(supervisor):
    rank = a_rank({"op": "finished", "attempt": 1, "elastic": False})
    child = a_rank()
    names = []
    for op in ("join", "finished", "join"):
        supervisor.hear(op)
        names.append(supervisor.process)
    assert len({*names, None}) == 3
    assert names[0] == names[1]
    for each, name in ((child, names[2]), (rank, names[0])):
        each.kill()
        assert supervisor.hear("gone") == {"op": "gone", "attempt": 1, "rank": 3}
        assert supervisor.process == name
        each.wait()


def test_it_notices_that_a_rank_has_gone_and_ends_one_when_told(supervisor):
    child = a_rank()
    supervisor.say(op="end", attempt=2)  # not the attempt that it belongs to
    supervisor.hear("beat")
    assert child.poll() is None
    supervisor.say(op="end", attempt=1)
    assert supervisor.hear("gone") == {"op": "gone", "attempt": 1, "rank": 3}
    assert child.wait(HANGS_SECONDS) == -signal.SIGKILL


@pytest.mark.parametrize("end", ["close", "silence"])
def test_without_a_supervisor_it_ends_the_ranks_and_itself(supervisor, end):
    child = a_rank()
    supervisor.be_silent()
    began = time.monotonic()
    if end == "close":
        supervisor.hang_up()
    else:
        supervisor.say(op="beat")  # the last one: whatever has delayed the others, the silence begins now
    assert child.wait(HANGS_SECONDS) == -signal.SIGKILL
    if end == "silence":
        assert time.monotonic() - began > node_process.SILENCE_SECONDS / 2
    with pytest.raises(OSError):
        for _ in range(100):
            link.connection().ask({"op": "load"})
            time.sleep(0.1)


def process_of(supervisor):
    """Return the ID of the keeper's process."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if supervisor.token.encode() in words:
                return int(path.parent.name)
    raise AssertionError("there is no keeper")


def test_the_time_in_which_it_was_stopped_is_no_silence(supervisor):
    child = a_rank()
    assert supervisor.hear("join") == JOIN
    keeper = process_of(supervisor)
    supervisor.be_silent()
    os.kill(keeper, signal.SIGSTOP)
    time.sleep(node_process.SILENCE_SECONDS + 0.5)
    supervisor.forget()
    os.kill(keeper, signal.SIGCONT)
    assert supervisor.hear("beat") == {"op": "beat"}  # it goes on, and has heard nothing for a long time
    supervisor.beat()
    for _ in range(2):
        assert supervisor.hear("beat") == {"op": "beat"}
    assert child.poll() is None
    child.kill()
    child.wait()


def test_a_rank_that_is_dead_already_keeps_no_other_rank_alive(supervisor):
    dead, alive = a_rank(), a_rank()
    keeper = process_of(supervisor)
    supervisor.hear("beat")
    os.kill(keeper, signal.SIGSTOP)
    supervisor.say(op="end", attempt=1)  # is read before the end of the rank's connection
    dead.kill()
    dead.wait()
    os.kill(keeper, signal.SIGCONT)
    assert alive.wait(HANGS_SECONDS) == -signal.SIGKILL
    assert supervisor.hear("gone") == {"op": "gone", "attempt": 1, "rank": 3}
    assert link.connection().ask({"op": "load"}) == ({}, None)


def test_a_rank_does_not_use_the_keeper_of_the_previous_attempt_that_is_about_to_end(supervisor):
    keeper = process_of(supervisor)
    os.kill(keeper, signal.SIGSTOP)
    supervisor.hang_up()
    environ = {**os.environ, "PMI_RANK": "0"}
    rank = subprocess.Popen(
        [sys.executable, start_of_a_rank.__file__, "-c", "input()"], stdin=subprocess.PIPE, env=environ
    )
    time.sleep(1)  # it waits for the answer of the keeper
    os.kill(keeper, signal.SIGCONT)
    supervisor.accept()
    assert supervisor.hear("start") == {"op": "start", "attempt": 1, "rank": 0}
    rank.communicate(b"\n", timeout=HANGS_SECONDS)
    assert rank.returncode == 0


@pytest.mark.parametrize("text", ["\N{GRINNING FACE}", "\x00", "\udc80", "word "])
def test_however_long_a_reason_is_it_is_passed_on(supervisor, monkeypatch, text):
    monkeypatch.setattr(report, "_said", [])
    report.has_failed(3, "it said " + text * 1000)
    said = supervisor.hear("failed")
    assert said["status"] == 3
    assert said["summary"].startswith("it said " + text * 90)
    assert len(said["summary"]) <= 500


@pytest.mark.parametrize("said", ["{", "[]", "{}", '{"op": "join"}', '{"op": "keep", "number": 1}', "\xff", "[" * 4000])
def test_what_is_no_message_ends_neither_the_keeper_nor_a_rank(supervisor, said):
    child = a_rank()
    assert supervisor.hear("join") == JOIN
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.settimeout(10)
        other.connect(link.supervision().address)
        other.send(said.encode("latin-1"))
        assert other.recv(100) == b"{}"
    supervisor.hear("beat")
    assert child.poll() is None
    assert link.connection().ask({"op": "load"}) == ({}, None)
    child.kill()
    assert supervisor.hear("gone") == {"op": "gone", "attempt": 1, "rank": 3}
    child.wait()


def test_without_a_supervisor_a_rank_ends_with_one_line():
    code = "from mn_guard.supervised import report; report.join(3, 4); print('joined')"
    with socket.socket() as deaf:  # it never listens, and so nobody else does at its port
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        environ = {**os.environ, link.VARIABLE: str(link.Supervision("127.0.0.1", port, secrets.token_hex(8), 1))}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    where = f"127.0.0.1, port {port}"
    assert done.stderr.count("cannot be reached") == 2  # the keeper says why
    assert f"rank 3: the supervisor of this job cannot be reached at {where}: this rank ends" in done.stderr


def test_the_error_says_that_the_keeper_has_ended():
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connected = link.Connection(near)
    far.close()
    with pytest.raises(ConnectionError, match="the keeper of this node has ended"):
        connected.ask({"op": "load"})


def test_it_beats_while_nobody_reads_what_it_says_about_a_death(supervisor):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"\n" * fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ))
    rank = {"op": "watch", "group": "one", "rank": 0, "size": 1, "process": 7, "expected": 1}
    rank |= {"folders": [], "ends_with_one": True}
    watched = death_reporter._known(death_reporter._introduced(link.supervision().address, rank, writing))
    os.close(writing)
    watched.sendall(node_process.SPOKEN + b"why it ends")
    watched.close()
    for _ in range(3):
        assert supervisor.hear("beat") == {"op": "beat"}
    who = f"rank 0 of 1 ({socket.gethostname()}, process 7)"
    with open(reading) as errors:
        assert errors.read().strip() == f"[chainermn] {who} has ended the job: why it ends"


class Interrupted(Exception):
    """What a signal handler of a script raises."""


@pytest.fixture
def while_it_waits(monkeypatch):
    """A function that lets a signal handler call another function once, when an answer is waited for."""
    receive = socket.recv_fds

    def in_handler(function):
        def receive_later(*arguments):
            monkeypatch.setattr(socket, "recv_fds", receive)
            signal.raise_signal(signal.SIGUSR1)
            return receive(*arguments)

        signal.signal(signal.SIGUSR1, lambda *_: function())
        monkeypatch.setattr(socket, "recv_fds", receive_later)

    before = signal.getsignal(signal.SIGUSR1)
    yield in_handler
    signal.signal(signal.SIGUSR1, before)


def interrupt():
    raise Interrupted


def test_the_answer_to_a_question_that_was_interrupted_is_not_that_to_the_next(supervisor, while_it_waits):
    memory = NodeMemory()
    memory.put(1, {"a": np.ones(3)})
    n_files = len(os.listdir("/proc/self/fd"))
    for question in (memory.get, lambda: memory.put(2, {"a": np.ones(3)})):
        while_it_waits(interrupt)
        with pytest.raises(Interrupted):
            question()
        assert link.connection().ask({"op": "over", "attempt": 1}) == ({}, None)
    assert memory.get()[0] == 2
    assert len(os.listdir("/proc/self/fd")) == n_files


def test_a_signal_handler_may_ask_while_the_answer_to_another_question_is_awaited(supervisor, while_it_waits):
    memory = NodeMemory()
    memory.put(1, {"a": np.ones(3)})
    found = []
    while_it_waits(lambda: found.append(link.connection().ask({"op": "over", "attempt": 1})))
    found.append(memory.get()[0])
    assert found == [({}, None), 1]


# It tells the keeper, which is stopped, more than that it has joined, and waits for no answer.
SAYS_AND_ENDS = """
import json, os, socket, sys
from mn_guard.supervised import link

def interrupt(*_):
    raise InterruptedError

link.connection().ask(json.loads(sys.argv[1]))
print("has joined", flush=True)
sys.stdin.readline()
socket.recv_fds = interrupt
for message in sys.argv[2:]:
    try:
        link.connection().ask(json.loads(message))
    except OSError:
        pass
"""


def test_what_a_process_has_said_counts_although_it_has_not_waited_for_answers(supervisor):
    failed = {"op": "failed", "attempt": 1, "status": 3, "summary": "why"}
    said = map(json.dumps, [JOIN, {"op": "load"}, failed])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", SAYS_AND_ENDS, *said], **pipes, text=True)
    assert supervisor.hear("join") == JOIN
    assert child.stdout.readline() == "has joined\n"  # the keeper has answered
    keeper = process_of(supervisor)
    os.kill(keeper, signal.SIGSTOP)
    child.communicate("\n", timeout=HANGS_SECONDS)
    os.kill(keeper, signal.SIGCONT)
    assert supervisor.hear("failed", "gone") == {**failed, "rank": 3}
    assert supervisor.hear("gone") == {"op": "gone", "attempt": 1, "rank": 3}


ARRAYS = {
    "a": np.arange(12.0).reshape(3, 4)[:, ::2],
    "none": np.zeros((0, 3), np.float32),
    "text": np.asarray("some words"),
    "scalar": np.asarray(7),
    "half": np.ones(5, np.float16),
    "fields": np.ones(3, [("a", "<i4"), ("b", ">f4", (2,))]),
}


def test_it_keeps_arrays_for_who_comes_next(supervisor):
    memory = NodeMemory()
    assert memory.is_there
    assert memory.get() is None
    for number in (10, 20, 30):
        memory.put(number, {**ARRAYS, "number": np.full(100, number)})
        assert supervisor.hear("kept") == {"op": "kept", "number": number}
    del memory
    number, found = NodeMemory().get()
    assert number == 30
    assert found.keys() == {*ARRAYS, "number"}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
    assert (found["number"] == 30).all()
    found["number"][...] = 0  # a copy
    assert (NodeMemory().get()[1]["number"] == 30).all()


def test_what_is_half_written_is_not_there(supervisor):
    memory = NodeMemory()
    memory.put(1, {"a": np.ones(1000)})
    with pytest.raises(TypeError, match="expected arrays without Python objects, got dtype object in b"):
        memory.put(2, {"a": np.zeros(1000), "b": np.asarray(None)})
    number, found = memory.get()
    assert (number, found["a"].sum()) == (1, 1000)


class Torn(dict):
    """Arrays of which only some are written: then the memory ends, or the rank is killed."""

    def values(self):
        yield self["a"]
        raise MemoryError


def test_what_is_held_is_not_written_to_after_a_failure(supervisor):
    memory = NodeMemory()
    for number in (1, 2):
        memory.put(number, {"a": np.full(1000, number), "b": np.full(1000, number)})
    for number in (3, 4):
        with pytest.raises(MemoryError):
            memory.put(number, Torn(a=np.full(1000, number), b=np.full(1000, number)))
    number, found = memory.get()
    assert (number, set(found["a"]), set(found["b"])) == (2, {2}, {2})
    for number in range(5, 9):
        memory.put(number, {"a": np.full(1000, number)})
        assert (memory.get()[1]["a"] == number).all()


def test_a_rank_that_the_others_have_lost_replaces_nothing(supervisor, monkeypatch):
    lost, other = NodeMemory(), NodeMemory()
    lost.put(1, ARRAYS)
    other.put(3, ARRAYS, generation=1)
    lost.put(2, ARRAYS)
    assert lost.get()[0] == 3
    other.put(1, ARRAYS, generation=1)  # another training of the script
    assert lost.get()[0] == 1
    monkeypatch.setenv(link.VARIABLE, str(link.supervision()._replace(attempt=2)))
    NodeMemory().put(2, ARRAYS)
    other.put(4, ARRAYS, generation=1)
    assert lost.get()[0] == 2


def test_descriptors_do_not_grow_in_number(supervisor):
    memory = NodeMemory()
    for number in range(3):
        memory.put(number, {"a": np.ones(1000 + number)})
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        memory.put(number, {"a": np.ones(1000 + number)})
        memory.get()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # the child only asks, and ends
def test_a_forked_child_has_no_part_in_the_connection(supervisor):
    child = os.fork()
    if not child:
        try:
            link.connection().ask({"op": "load"})
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert link.connection().ask({"op": "load"}) == ({}, None)
