"""The process of a node reports which rank died first; these tests imitate its ranks without MPI."""

import itertools
import mmap
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import types

import pytest

from mn_guard import death_reporter, job, node, node_process
from mn_guard.node_process import Rank, describe_death, describe_others

FOLDERS = ("/lib/mn_comm/", "/lib/chainer/")
STACK = """Current thread 0x00007f (most recent call first):
  File "/lib/mn_comm/ranks/intracomm.py", line 104 in call
  File "/lib/mn_comm/communicator.py", line 224 in allreduce
  File "/lib/mn_comm/ranks/watch.py", line 118 in call
  File "/home/me/train.py", line 12 in average
  File "/lib/chainer/training/trainer.py", line 343 in run
  File "/home/me/train.py", line 30 in <module>
"""


def test_the_line_names_the_operation_and_the_line_of_the_script():
    line = describe_death(Rank(1, 3, 77, STACK), "was ended by SIGTERM", "host", FOLDERS)
    assert line == (
        "rank 1 of 3 (host, process 77) was ended by SIGTERM in allreduce, at /home/me/train.py:12 in average"
    )


def test_python_s_own_files_are_not_the_script():
    stack = f'  File "{os.__file__}", line 1 in walk\n  File "train.py", line 2 in <module>\n'
    assert describe_death(Rank(0, 2, 7, stack), "died", "host", FOLDERS).endswith("died, at train.py:2 in <module>")


@pytest.mark.parametrize("generated", ["<lambda>", "__init__", "__eq__"])
@pytest.mark.parametrize("script", ["/home/me/train.py", "<string>", "<stdin>"])
def test_functions_that_python_generates_are_not_the_script(generated, script):
    """They are those of a named tuple or a dataclass; the program may have no file either."""
    stack = STACK.replace("/home/me/train.py", script)
    stack = stack.replace("first):\n", f'first):\n  File "<string>", line 1 in {generated}\n')
    line = describe_death(Rank(1, 3, 77, stack), "was ended by SIGTERM", "host", FOLDERS)
    assert line.endswith(f"was ended by SIGTERM in allreduce, at {script}:12 in average")


def test_a_rank_may_be_at_the_end_of_its_program():
    files = {"/lib/mn_comm/ranks/background.py": "close_all", "/lib/mn_guard/exit_sequence.py": "_run"}
    stack = "".join(f'  File "{file}", line 1 in {name}\n' for file, name in files.items())
    line = describe_death(Rank(0, 2, 7, stack), "was ended by SIGTERM", "host", FOLDERS)
    assert line.endswith("was ended by SIGTERM, at the end of its program")


def test_only_some_of_the_others_are_named():
    others = [Rank(rank, 8, rank, STACK) for rank in range(1, 8)] + [Rank(8, 8, 8)]
    line = describe_others(others, FOLDERS)
    assert line.count("in allreduce, at /home/me/train.py:12 in average") == 4
    assert line.startswith("meanwhile: rank 1 in ")
    assert line.endswith("; and 3 more")
    assert describe_others(others[-1:], FOLDERS) == ""


def test_a_program_may_wait_for_all_its_children():
    """It has then waited for the shell that starts the process, too."""
    there = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert node.start(node.listen(f"\0{os.getpid()}-ignored"), "0") == 0
    finally:
        signal.signal(signal.SIGCHLD, there)


# The output of a rank, and how it ends.
PLAYED = """
import os, signal, sys
from mn_guard.death_reporter import _introduced, _known
rank = int(sys.argv[2])
who = {"op": "watch", "group": "all", "rank": rank, "size": 2, "process": os.getpid()}
first = {"expected": 2, "folders": sys.argv[3:], "ends_with_one": True} if rank == 0 else {}
connection = _known(_introduced("\\0" + sys.argv[1], who | first, *([2] if rank == 0 else [])))
print("here", flush=True)
sys.stdin.readline()
"""
CAUSES = {
    "os.kill(os.getpid(), signal.SIGKILL)": r"was killed by SIGKILL (the system does this when memory has run out)",
    "os._exit(4)": "ended with status 4 before the end of its program, for example by MPI_Abort or os._exit",
    "connection.sendall(b'Fatal Python error: Aborted\\n'); os._exit(1)": "died of a fatal error (Aborted)",
    "connection.sendall(b'\\1'); os._exit(1)": "",
    "connection.sendall(b'\\2'); os._exit(1)": "",
    "connection.sendall(b'\\2why it ends'); os._exit(1)": "has ended the job: why it ends",
}


FIRST = {"folders": FOLDERS, "ends_with_one": True}


def connected(*who):
    return death_reporter._known(death_reporter._introduced(*who))


def started(expected):
    """Start the process of a node; return its address."""
    address, listening = death_reporter._address()
    assert node.start(listening, str(expected)) == 0
    return address


@pytest.mark.parametrize("ends", CAUSES)
def test_how_a_rank_has_ended(ends, capfd):
    address = started(2)
    ranks = []
    for rank, end in enumerate(["connection.sendall(b'\\1')", ends]):
        played = subprocess.Popen(
            [sys.executable, "-c", PLAYED + end, address[1:], str(rank), *FOLDERS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert played.stdout.readline() == "here\n"
        ranks.append(played)
    # Its status is not collected before it is checked.
    ranks[1].stdin.write("end\n")
    ranks[1].stdin.flush()
    wanted = f"[chainermn] rank 1 of 2 ({socket.gethostname()}, process {ranks[1].pid}) {CAUSES[ends]}\n"
    said, deadline = "", time.monotonic() + 10
    while CAUSES[ends] and wanted not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
    for rank in ranks:
        rank.communicate("end\n")
    assert said == (wanted if CAUSES[ends] else "")


def test_nobody_is_asked_where_it_cannot_start(monkeypatch):
    for executable in ("/nowhere/python", None):
        monkeypatch.setattr(node.sys, "executable", executable)
        assert death_reporter._address() == (None, None)
    assert connected(None, {}) is None


def watched():
    """Return the connection of the only rank of a new node."""
    who = {"op": "watch", "group": "one", "rank": 0, "size": 1, "process": os.getpid(), **FIRST, "expected": 1}
    return connected(started(1), who, *death_reporter._errors())


def test_the_process_is_no_child_of_the_rank():
    connection = watched()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    connection.sendall(node_process.FINISHED)
    connection.close()


def test_a_file_of_the_script_may_be_called_secrets(monkeypatch):
    monkeypatch.setitem(sys.modules, "secrets", types.ModuleType("secrets"))
    connection = watched()
    connection.sendall(node_process.FINISHED)
    connection.close()


def test_the_launcher_s_pipe_is_not_held_longer_than_the_ranks_live():
    """A supervised job's process of the node outlives the ranks, and launchers wait for everybody who holds it."""
    reading, writing = os.pipe()
    address = f"\0chainermn-test-{os.urandom(8).hex()}"
    assert node.start(node.listen(address), "2") == 0  # of another group, one is still expected
    who = {"op": "watch", "group": "one", "rank": 0, "size": 1, "process": os.getpid(), **FIRST, "expected": 1}
    connection = connected(address, who, writing)
    os.close(writing)
    connection.sendall(node_process.FINISHED)
    connection.close()
    assert os.read(reading, 100) == b""  # the end of the pipe, not a message
    os.close(reading)
    # The process still runs.
    last = connected(address, who | {"group": "two"}, 2)
    last.sendall(node_process.FINISHED)
    last.close()


def test_a_launcher_that_has_ended_ends_nothing_else():
    reading, writing = os.pipe()
    os.close(reading)
    address = started(2)
    who = {"op": "watch", "group": "one", "rank": 0, "size": 1, "process": 1, **FIRST, "expected": 1}
    connection = connected(address, who, writing)
    os.close(writing)
    connection.sendall(node_process.SPOKEN + b"why it ends")
    connection.close()
    last = connected(address, who | {"group": "two"}, 2)
    assert last is not None
    last.sendall(node_process.FINISHED)
    last.close()


# Another thread may fork while a rank connects; here, the rank itself does.
FORKS_MEANWHILE = """
import os, signal, sys
from mn_guard import death_reporter, node

class Alone:
    rank = 0
    allgather = staticmethod(lambda each: [each])

def start(*arguments):
    if not os.fork():
        sys.stdin.read()
        os._exit(0)
    return start_node(*arguments)

start_node, node.start = node.start, start
death_reporter.connect(Alone, 0, 1, list)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_is_forked_meanwhile_does_not_hold_the_connection():
    piped = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FORKS_MEANWHILE], **piped) as rank:
        reported, *_ = select.select([rank.stderr], [], [], 20)
        rank.stdin.close()  # the child ends
        assert b"rank 0 of 1" in rank.stderr.readline()
        assert reported


NOBODY = 1 << 30  # no process has this ID
CRASH = b'Fatal Python error: Segmentation fault\n\n  File "/home/me/train.py", line 12 in read\n'


class Late:
    """The process of a node that is late, and three ranks that end before it reads."""

    def __init__(self, **first):
        self._reading, writing = os.pipe()
        group = {"op": "watch", "group": "all", "size": 3, "process": NOBODY, "expected": 3, **FIRST, **first}
        listening = socket.socket(socket.AF_UNIX)
        listening.bind("")  # to a name that the system chooses
        listening.listen()
        self._node = node_process._Node(listening, group["expected"], None)
        pairs = [socket.socketpair() for _ in range(3)]
        for rank, (_, there) in enumerate(pairs):
            self._node._watch(group | {"rank": rank}, there.detach(), *([] if rank else [writing]))
        self._ranks = [here for here, _ in pairs]

    def end(self, rank, words=b""):
        self._ranks[rank].sendall(words)
        self._ranks[rank].close()

    def look(self):
        self._node._report(self._node._look(None))

    def said(self):
        with open(self._reading) as pipe:
            return pipe.read()


def reported_late(*ends):
    """Return what it writes when ranks have already ended, each with its last words."""
    late = Late()
    for end in ends:
        late.end(*end)
    late._node.run()
    return late.said()


def test_only_the_rank_that_died_first_is_reported_however_late():
    named = f"[chainermn] rank 1 of 3 ({socket.gethostname()}, process {NOBODY})"
    assert reported_late((1, CRASH), (2, b""), (0, b"")) == (
        f"{named} died of a fatal error (Segmentation fault), at /home/me/train.py:12 in read\n"
    )
    assert reported_late((1, b""), (2, STACK.encode()), (0, b"")) == (
        f"{named} died of a signal, or called os._exit\n"
        "[chainermn] meanwhile: rank 2 in allreduce, at /home/me/train.py:12 in average\n"
    )
    assert reported_late((1, node_process.SPOKEN + b"why it ends"), (2, b""), (0, b"")) == (
        f"{named} has ended the job: why it ends\n"
    )


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(monkeypatch):
    """It has died before it could connect, and the launcher has ended the other ones."""
    monkeypatch.setattr(node_process, "_ARRIVAL_SECONDS", 0.1)
    late = Late(expected=4)
    for rank in range(3):
        late.end(rank, node_process.FINISHED)
    late._node.run()
    assert late.said() == ""  # and the launcher's pipe is no longer held


@pytest.mark.parametrize("ends_with_one", [True, False])
def test_ranks_that_the_launcher_ends_later_are_not_reported(ends_with_one, monkeypatch):
    monkeypatch.setattr(node_process, "_TOGETHER_SECONDS", 0)
    late = Late(ends_with_one=ends_with_one)
    for rank in (1, 2, 0):
        late.end(rank)
        late.look()
    named = re.findall(r"^\[chainermn\] rank (\d) of 3", late.said(), re.M)
    assert named == (["1"] if ends_with_one else ["1", "2", "0"])


def test_a_process_that_is_about_to_be_dead_is_waited_for(monkeypatch):
    rank, exiting, alive = Rank(0, 1, os.getpid()), 0x400004, 0x400000
    node_process.await_deaths([rank])
    assert rank.state not in ("Z", "")  # only its connection has ended
    for seen, state in [
        ([("R", 0, exiting), ("D", 0, exiting), ("Z", 9, exiting)], "Z"),
        ([("R", 0, 0), ("Z", 9, 0)], "Z"),  # in gVisor
        (itertools.repeat(("D", 0, exiting)), ""),
        (itertools.repeat(("S", 0, alive)), "S"),
        (itertools.repeat(("S", 0, 0)), "S"),
    ]:
        monkeypatch.setattr(node_process, "_DEATH_SECONDS", 60 if isinstance(seen, list) else 0.01)
        shown = iter(seen)
        monkeypatch.setattr(node_process, "_status", lambda _, shown=shown: next(shown))
        node_process.await_deaths([rank])
        assert rank.state == state


def test_deaths_that_nobody_has_caused_are_all_reported():
    """In a job that goes on without ranks, for example if memory has run out on the node."""
    late = Late(ends_with_one=False)
    late.end(1, CRASH)
    late.end(0)
    late._node._report(late._node._look(None))
    late.end(2, node_process.FINISHED)
    late._node.run()
    assert re.findall(r"rank (\d) of 3 .* died of", late.said()) == ["1", "0"]


def test_what_a_rank_writes_after_its_summary_is_not_part_of_it():
    group = node_process.Group(1, "host", (), True, -1)
    rank = Rank(0, 1, 7)
    group.hear(rank, node_process.SPOKEN + b"ValueError: no\n" + STACK.encode())
    assert (rank.summary, rank.words) == ("ValueError: no", STACK)


def test_files_that_no_process_has_in_its_memory_are_removed(monkeypatch, tmp_path):
    scans = []
    listdir = os.listdir
    monkeypatch.setattr(node_process.os, "listdir", lambda path: scans.append(path) or listdir(path))
    group = node_process.Group(1, "host", (), True, os.open(os.devnull, os.O_WRONLY))
    for name in ("segment 1", "segment 12", "other"):
        (tmp_path / name).write_bytes(b"0")
        group.shared.add((f"{tmp_path}/{name}", (tmp_path / name).stat().st_ino))
    group.shared |= {(f"{tmp_path}/removed", 7), (f"{tmp_path}/other", 7)}
    with open(tmp_path / "segment 12") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        group.remove()
    assert listdir(tmp_path) == ["segment 12"]
    assert scans == ["/proc"]


def test_names_need_not_be_text(tmp_path):
    """The kernel cuts the name of a process after 15 bytes, also within a character."""
    code = "open('/proc/self/comm', 'wb').write(b'of a rank \\xff'); raise SystemExit(3)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        rank = Rank(0, 1, process.pid)
        node_process.await_deaths([rank])
        assert (rank.state, rank.status) == ("Z", 3 << 8)
        assert job.name_and_parent(process.pid) == ("of a rank \N{REPLACEMENT CHARACTER}", os.getpid())
    path = os.fsencode(tmp_path) + b"/\xff"
    with open(path, "wb") as file:
        file.write(b"0")
    with open(path) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        death_reporter._shared_memory()  # which does not raise
        assert f"{tmp_path}/\N{REPLACEMENT CHARACTER}" in node_process._mapped()
