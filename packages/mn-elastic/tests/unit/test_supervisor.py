"""The supervisor with a launcher that the tests imitate: strangers that connect to it, and signals; without MPI."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from supervised import changed

from mn_elastic.supervision.supervisor import _lack_of_shared_memory as lack_of_shared_memory

GREETING = """
import json, os, socket, sys

if "--version" in sys.argv:
    print("HYDRA build details: Version: 5.0.2")
    sys.exit()
host, port, token, attempt = os.environ["CHAINERMN_SUPERVISOR"].split()

def connect():
    return socket.create_connection((host, int(port)), 20)

def line(**message):
    return json.dumps(message).encode() + b"\\n"

def is_dropped(connection):
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True

keeper = connect()
keeper.sendall(line(op="keeper", token=token, host="here"))
"""
KEEPER = f"""{GREETING}
rank = dict(attempt=int(attempt), rank=0, process=0)
keeper.sendall(line(op="join", size=1, **rank))
"""
# Like the real keeper, it ends after the supervisor: if it ended with unread messages, TCP would discard its own.
FINISHED = """
keeper.sendall(line(op="finished", elastic=False, **rank))
keeper.sendall(line(op="gone", **rank))
if not os.fork():
    try:
        while keeper.recv(1 << 16):
            pass
    finally:
        os._exit(0)
"""


def launcher(tmp_path, body, first=f"#!{sys.executable}\n{KEEPER}"):
    path = tmp_path / "mpiexec"
    path.write_text(first + body)
    path.chmod(0o755)
    return str(path)


def command(mpiexec, *options, program=("-m", "mn_comm")):
    return [sys.executable, *program, "elastic", "-n", "1", "--mpiexec", mpiexec, *options, "script.py"]


def as_from_a_terminal():
    # A shell lets commands in the background ignore SIGINT, and so would the tests.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setpgrp()


def start(tmp_path, mpiexec, *options, before=as_from_a_terminal, **program):
    started = command(mpiexec, *options, **program)
    return subprocess.Popen(started, stderr=subprocess.PIPE, text=True, cwd=tmp_path, preexec_fn=before)


STRANGERS = {
    "http": "b'GET / HTTP/1.1\\r\\n\\r\\n'",
    "no object": "b'[]\\n'",
    "no text": "b'\\xff\\xfe\\n'",
    "deep": "b'[' * 4000 + b'\\n'",
    "no token": "line(op='keeper', host='x')",
    "another token": "line(op='keeper', token='caf\\u00e9', host='x')",
    "no host": "line(op='keeper', token=token, host=None)",
    "other words first": "line(op='join', attempt=1, rank=0, size=9)",
    "endless": "b'x' * 200_000",
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_dropped_and_nothing_else_happens(tmp_path, said):
    body = f"stranger = connect()\nstranger.sendall({said})\nassert is_dropped(stranger)\n{FINISHED}"
    supervisor = start(tmp_path, launcher(tmp_path, body), "--restart", "0")
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, errors
    assert errors.splitlines()[-1] == "[chainermn elastic] the training is complete"
    assert "Traceback" not in errors


@pytest.mark.parametrize("said", ["b'}\\n'", "b'[]\\n'", "b'{}\\n'", "line(op='kept', number='x')"])
def test_one_wrong_line_of_a_keeper_is_passed_over(tmp_path, said):
    supervisor = start(tmp_path, launcher(tmp_path, f"keeper.sendall({said})\n{FINISHED}"), "--restart", "0")
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, errors
    assert "expected a message from the keeper of here, got " in errors


# A launcher of ranks that never have a communicator.
OTHER = f"""#!{sys.executable}
import os, signal, sys, time
if "--version" in sys.argv:
    print("HYDRA build details: Version: 5.0.2")
    sys.exit()
"""
WAITS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("new", "w") as file:
    file.write(str(os.getpid()))
os.rename("new", "process")
time.sleep(600)
"""


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_changes_nothing(tmp_path, number):
    supervisor = start(tmp_path, launcher(tmp_path, WAITS, OTHER))
    wait_for((tmp_path / "process").exists)
    for _ in range(4):
        supervisor.send_signal(number)
        time.sleep(0.1)
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 128 + number, errors
    assert errors.splitlines()[-1] == "[chainermn elastic] asked to end: the job ends"
    assert "Traceback" not in errors
    process = Path("/proc", (tmp_path / "process").read_text())
    wait_for(lambda: not process.exists())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_hosts_are_asked_ends_it(tmp_path, number):
    agent = tmp_path / "agent"
    # It sends the signal itself, as it is given only a few seconds.
    agent.write_text(f"#!/bin/sh\nkill -{int(number)} $PPID\nexec sleep 600\n")
    agent.chmod(0o755)
    mpiexec = launcher(tmp_path, "sys.exit(1)")
    supervisor = start(tmp_path, mpiexec, "--hosts", "127.0.0.1:1", "--ssh", str(agent))
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 128 + number, errors
    assert errors.splitlines()[-1] == "[chainermn elastic] asked to end: the job ends"
    assert "Traceback" not in errors


def test_a_signal_that_is_ignored_from_the_start_stays_ignored(tmp_path):
    hangs_up = launcher(tmp_path, f"os.kill(os.getppid(), {int(signal.SIGHUP)})\n{FINISHED}")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        supervisor = start(tmp_path, hangs_up, "--restart", "0")
    finally:
        signal.signal(signal.SIGHUP, before)
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, errors


def from_careless_hands():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def test_it_hears_signals_and_statuses_although_its_parent_did_not_want_to(tmp_path):
    body = "sys.exit(4 if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []) else 3)\n"
    supervisor = start(tmp_path, launcher(tmp_path, body, OTHER), "--restart", "0", before=from_careless_hands)
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 3, errors
    supervisor = start(tmp_path, launcher(tmp_path, WAITS, OTHER), before=from_careless_hands)
    wait_for((tmp_path / "process").exists)
    supervisor.terminate()
    assert supervisor.wait(60) == 128 + signal.SIGTERM
    supervisor.stderr.close()


KILLS_NO_OTHERS = """
import os
kill_group = os.killpg
def kill_group_of_a_known_process(group, number):
    with open("known", "w") as file:
        file.write(str(os.path.exists(f"/proc/{group}")))
    kill_group(group, number)
os.killpg = kill_group_of_a_known_process
"""


@pytest.mark.parametrize(("ends", "status"), [(FINISHED, 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_the_number_of_a_group_that_is_killed_is_not_another_s(tmp_path, ends, status):
    """The system may give the number of a process that was waited for to another one, if its group has ended, too."""
    program = "-c", changed(KILLS_NO_OTHERS)
    first = f"#!{sys.executable}\n{KEEPER}" if ends == FINISHED else OTHER
    supervisor = start(tmp_path, launcher(tmp_path, ends, first), "--restart", "0", program=program)
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == status, errors
    assert (tmp_path / "known").read_text() == "True"


BEATS = """
import time
with open("new", "w") as file:
    file.write(str(os.getpid()))
os.rename("new", "process")
while not os.path.exists("continued"):
    keeper.sendall(line(op="beat"))
    time.sleep(0.1)
"""


def test_the_time_in_which_all_were_stopped_is_no_silence(tmp_path):
    program = "-c", changed("supervisor.SILENCE_SECONDS = 5")
    supervisor = start(tmp_path, launcher(tmp_path, BEATS + FINISHED), "--restart", "0", program=program)
    wait_for((tmp_path / "process").exists)
    mpiexec = int((tmp_path / "process").read_text())
    for process in (mpiexec, supervisor.pid):
        os.kill(process, signal.SIGSTOP)
    time.sleep(5.5)
    supervisor.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    os.kill(mpiexec, signal.SIGCONT)
    (tmp_path / "continued").touch()
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, errors
    assert len(errors.splitlines()) == 2, errors


IS_STOPPED = """
os.kill(os.getppid(), signal.SIGTSTP)
time.sleep(0.2)
with open(f"/proc/{os.getppid()}/stat") as file:
    state = file.read().rpartition(")")[2].split()[0]
if state == "T":
    os.kill(os.getppid(), signal.SIGCONT)
    sys.exit("it is stopped")
"""


def test_ctrl_z_does_not_stop_it(tmp_path):
    body = f"import signal, time\n{IS_STOPPED}{FINISHED}"
    supervisor = start(tmp_path, launcher(tmp_path, body), "--restart", "0")
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, errors


def test_it_goes_on_if_nobody_reads_what_it_says(tmp_path):
    supervisor = start(tmp_path, launcher(tmp_path, FINISHED), "--restart", "0")
    supervisor.stderr.close()
    assert supervisor.wait(60) == 0


HEARS_BEATS = """
for _, heard in zip(range(2), keeper.makefile()):
    assert json.loads(heard) == {"op": "beat"}
    keeper.sendall(line(op="beat"))
open("heard", "w").close()
"""


def test_keepers_hear_of_it_while_nobody_reads_what_it_says(tmp_path):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"\n" * fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ))
    started = command(launcher(tmp_path, HEARS_BEATS + FINISHED), "--restart", "0")
    supervisor = subprocess.Popen(started, stderr=writing, cwd=tmp_path)
    os.close(writing)
    with open(reading) as errors:
        try:
            wait_for((tmp_path / "heard").exists)
            said = errors.read().split("\n")
            assert supervisor.wait(60) == 0
        finally:
            supervisor.kill()
            supervisor.wait()
    expected = ["attempt 1: 1 ranks", "the training is complete"]
    assert [*filter(None, said)] == [f"[chainermn elastic] {each}" for each in expected]


def test_it_runs_without_stderr(tmp_path):
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command(launcher(tmp_path, FINISHED), "--restart", "0")]
    assert subprocess.run(closed, cwd=tmp_path, timeout=60).returncode == 0


START = """
for rank in range(2):
    keeper.sendall(line(op="start", attempt=int(attempt), rank=rank, process=rank))
"""
WAIT = """
import time
while True:
    keeper.sendall(line(op="beat"))
    time.sleep(0.4)
"""
JOINS = "keeper.sendall(line(op='join', attempt=int(attempt), rank=0, process=0, size=2))\n"
DIES = "keeper.sendall(line(op='gone', attempt=int(attempt), rank=1, process=1))\n"


@pytest.mark.parametrize("joined", ["", JOINS], ids=["alone", "with another"])
def test_a_rank_that_ends_before_its_communicator_ends_the_attempt(tmp_path, joined):
    mpiexec = launcher(tmp_path, START + joined + DIES + WAIT, f"#!{sys.executable}\n{GREETING}")
    supervisor = start(tmp_path, mpiexec, "--restart", "0", "-n", "2")
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1
    assert "rank 1 has ended before it had made a communicator" in errors


@pytest.mark.parametrize(("joined", "n_joined"), [("", 0), (JOINS, 1)], ids=["none", "one"])
def test_ranks_that_do_not_come_together_are_ended(tmp_path, joined, n_joined):
    mpiexec = launcher(tmp_path, START + joined + WAIT, f"#!{sys.executable}\n{GREETING}")
    supervisor = start(tmp_path, mpiexec, "--restart", "0", "--start-limit", "3", "--spares", "0", "-n", "2")
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1
    expected = f"{n_joined} of 2 ranks have made a communicator within 3 s (--start-limit)"
    assert expected in errors


@pytest.mark.parametrize(("free", "said"), [(1 << 20, ["/there has only 1.0 MiB left"]), (1 << 32, [])])
def test_little_shared_memory_is_named(monkeypatch, free, said):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    assert lack_of_shared_memory("/there") == said


def test_a_system_without_a_folder_for_shared_memory():
    assert lack_of_shared_memory("/is/not/there") == []


# The keeper outlives the launcher, which fails; it counts what it hears while the agent waits for it.
OUTLIVES = """
reading, writing = os.pipe()
if os.fork():
    os.close(writing)
    os.read(reading, 1)
    sys.exit(1)
os.setsid()  # before the launcher ends, whose group the supervisor then kills
os.close(writing)
keeper.settimeout(0.4)
heard = -1  # the first may have been sent before
while heard < 2:
    is_asked = os.path.exists("asked")
    try:
        keeper.sendall(line(op="beat"))
        came = keeper.recv(1 << 16)
    except TimeoutError:
        continue
    except ConnectionError:
        came = b""
    if not came:  # the supervisor has ended
        sys.exit()
    heard += is_asked and b'"beat"' in came
open("heard", "w").close()
"""
# So that the time that a host is given ends nothing before the keeper has heard enough.
PATIENT = changed("launch._PROBE_SECONDS = 30")


def test_keepers_hear_of_it_while_hosts_are_asked(tmp_path):
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\n: >asked\nuntil [ -e heard ]; do sleep 0.05; done\nexit 1\n")
    agent.chmod(0o755)
    mpiexec = launcher(tmp_path, OUTLIVES, f"#!{sys.executable}\n{GREETING}")
    asks = ("--hosts", "127.0.0.1:1", "--ssh", str(agent))
    supervisor = start(tmp_path, mpiexec, *asks, program=("-c", PATIENT))
    _, errors = supervisor.communicate(timeout=60)
    assert "giving up: there is room for 0 ranks on the hosts that answer" in errors
    assert (tmp_path / "heard").exists()


# The keeper of the first attempt outlives the launcher. A rank reports to it while the agent waits.
REPORTS_LATE = """
import time
reading, writing = os.pipe()
if attempt == "2":
    deadline = time.monotonic() + 10
    while not os.path.exists("ended"):
        if time.monotonic() > deadline:
            sys.exit("the rank of the first attempt was not ended")
        keeper.sendall(line(op="beat"))
        time.sleep(0.1)
elif os.fork():
    os.close(writing)
    os.read(reading, 1)
    sys.exit(1)
else:
    os.setsid()  # before the launcher ends, whose group the supervisor then kills
    os.close(writing)
    n_beats = None
    for heard in map(json.loads, keeper.makefile()):
        keeper.sendall(line(op="beat"))
        if heard == {"op": "end", "attempt": 1} and n_beats is None:
            keeper.sendall(line(op="start", attempt=1, rank=0, process=7))
            n_beats = 0
        elif heard == {"op": "end", "attempt": 1}:
            open("ended", "w").close()
        elif n_beats is not None:
            n_beats += 1
            if n_beats == 2:  # the report was read before this beat
                open("heard", "w").close()
    sys.exit()
keeper.sendall(line(op="join", size=1, attempt=2, rank=0, process=0))
"""


def test_a_rank_that_reports_between_two_attempts_is_ended(tmp_path):
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\nuntil [ -e heard ]; do sleep 0.05; done\n")
    agent.chmod(0o755)
    ends = FINISHED.replace("**rank", "attempt=2, rank=0, process=0")
    mpiexec = launcher(tmp_path, REPORTS_LATE + ends, f"#!{sys.executable}\n{GREETING}")
    asks = ("--hosts", "127.0.0.1:1", "--ssh", str(agent))
    supervisor = start(tmp_path, mpiexec, *asks, "--restart", "1", program=("-c", PATIENT))
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, errors
