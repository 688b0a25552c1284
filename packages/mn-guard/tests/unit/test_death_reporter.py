"""The process of a node reports which rank died first; these tests imitate its ranks without MPI."""

import os
import socket
import subprocess
import sys
import time
import types

import pytest

from mn_guard import death_reporter, node, node_process
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


# The output of a rank, and how it ends.
PLAYED = """
import os, signal, sys
from mn_guard.death_reporter import _introduced, _known
rank = int(sys.argv[2])
who = {"op": "watch", "group": "all", "rank": rank, "size": 2, "process": os.getpid()}
first = {"expected": 2, "folders": sys.argv[3:]} if rank == 0 else {}
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
    who = {"op": "watch", "group": "one", "rank": 0, "size": 1, "process": os.getpid(), "expected": 1, "folders": []}
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
    who = {"op": "watch", "group": "one", "rank": 0, "size": 1, "process": os.getpid(), "expected": 1, "folders": []}
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
    who = {"op": "watch", "group": "one", "rank": 0, "size": 1, "process": 1, "expected": 1, "folders": []}
    connection = connected(address, who, writing)
    os.close(writing)
    connection.sendall(node_process.SPOKEN + b"why it ends")
    connection.close()
    last = connected(address, who | {"group": "two"}, 2)
    assert last is not None
    last.sendall(node_process.FINISHED)
    last.close()


NOBODY = 1 << 30  # no process has this ID
CRASH = b'Fatal Python error: Segmentation fault\n\n  File "/home/me/train.py", line 12 in read\n'


def reported_late(*ends):
    """Return what the process of a node writes when three ranks have already ended, each with its last words."""
    reading, writing = os.pipe()
    late = node_process._Node(socket.socket(socket.AF_UNIX), len(ends), None)
    group = {"op": "watch", "group": "all", "size": len(ends), "expected": len(ends), "folders": FOLDERS}
    connections = []
    for rank in range(len(ends)):
        here, there = socket.socketpair()
        late._watch(group | {"rank": rank, "process": NOBODY}, there.detach(), *([] if rank else [writing]))
        connections.append(here)
    for rank, words in ends:
        connections[rank].sendall(words)
        connections[rank].close()
    late.run()
    with open(reading) as pipe:
        return pipe.read()


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
