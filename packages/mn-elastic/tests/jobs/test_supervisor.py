"""Jobs that are restarted, with the mpiexec on PATH."""

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from processes import is_alive
from supervised import SCRIPT, changed, run, run_script


def said(done):
    return [line.partition("] ")[2] for line in done.stderr.splitlines() if "[chainermn elastic]" in line]


def test_a_job_that_comes_to_its_end_is_started_once(tmp_path):
    done = run(tmp_path, "count(5)", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert said(done) == ["attempt 1: 2 ranks", "the training is complete"]
    assert done.stdout.count("ends with 5") == 2


def test_after_a_rank_was_killed_it_goes_on_from_memory(tmp_path):
    die = "lambda step: die() if attempt == 1 and step == 25 and comm.rank else None"
    done = run(tmp_path, f"count(40, {die})", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 2 of 2 begins at 20 with 20") == 2
    assert done.stdout.count("ends with 40") == 2
    assert said(done)[-1] == "the training is complete, after 1 restart"


def test_it_gives_up_with_the_status_of_the_rank_that_failed(tmp_path):
    done = run(tmp_path, "count(10)\nsys.exit(3 if comm.rank else 0)", "-n", "2", "--restart", "1")
    assert done.returncode == 3, done.stderr
    assert said(done)[-1] == "giving up: it was started 2 times"
    assert "attempt 1 has failed: rank 1: exit status 3" in said(done)


def test_it_gives_up_where_nothing_gets_any_further(tmp_path):
    done = run(tmp_path, "count(25, lambda step: 1 / 0 if step == 15 else None)", "-n", "1", "--restart", "9")
    assert done.returncode == 1, done.stderr
    assert said(done)[-1] == "giving up: 3 attempts in a row have failed, and nothing newer than number 10 was kept"
    assert sum("has failed: rank 0: " in line for line in said(done)) == 3
    assert done.stderr.count("ZeroDivisionError: division by zero") >= 3


def test_the_status_is_not_the_launchers(tmp_path):
    launcher = tmp_path / "mpiexec"
    found = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    launcher.write_text(f'#!/bin/sh\n"{found}" "$@"\n[ "$1" = --version ] || exit 137\n')
    launcher.chmod(0o755)
    done = run(tmp_path, "count(5)", "-n", "2", "--mpiexec", str(launcher))
    assert done.returncode == 0, done.stderr


def test_a_launcher_that_does_not_end_is_ended(tmp_path):
    launcher = tmp_path / "mpiexec"
    found = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    launcher.write_text(f'#!/bin/sh\n"{found}" "$@"\n[ "$1" = --version ] || sleep 600\n')
    launcher.chmod(0o755)
    done = run(tmp_path, "count(5)", "-n", "2", "--mpiexec", str(launcher), seconds=40)
    assert done.returncode == 0, done.stderr


def test_a_script_without_a_communicator_is_no_training(tmp_path):
    Path(tmp_path, "other.py").write_text("print('nothing')")
    done = run(tmp_path, "", "-n", "1", "--restart", "0", "other.py")
    assert done.returncode == 1
    assert "attempt 1 has failed: no rank has made a communicator" in said(done)


# Both ranks end together: one that is left alone for long is ended by the supervisor, and the status is another one.
TOGETHER = """
import os, sys, time
open(f"{os.getpid()}.rank", "w").close()
while sum(name.endswith(".rank") for name in os.listdir()) < 2:
    time.sleep(0.01)
sys.exit(3)
"""


@pytest.mark.parametrize("loads", ["", "import mn_elastic", "from mpi4py import MPI"], ids=str)
def test_the_status_of_ranks_without_a_communicator_is_that_of_the_launcher(tmp_path, loads):
    program = "-c", changed("supervisor._EARLY_SECONDS = 60")
    done = run_script(tmp_path, loads + TOGETHER, "-n", "2", "--restart", "0", program=program)
    assert done.returncode == 3, done.stderr


# A signal ends rank 0 when both have reported the end of the script: what is registered first is called last.
ENDS_BADLY = """
import atexit, os, sys, time

def end():
    open(f"{comm.rank}.has-ended", "w").close()
    while comm.rank == 0 and not os.path.exists("1.has-ended"):
        time.sleep(0.01)
    if comm.rank == 0:
        os.kill(os.getpid(), int(sys.argv[1]))

atexit.register(end)
import mn_comm
comm = mn_comm.create_communicator("naive")
"""


def test_a_signal_after_the_end_of_the_script_is_no_failure(tmp_path):
    done = run_script(tmp_path, ENDS_BADLY, "-n", "2", "--restart", "0", arguments=["11"])
    assert done.returncode == 0, done.stderr


# All ranks are ended because of one; the launcher waits for what it has started.
LEAVES_A_PROCESS = """
import os
if os.environ.get("PMIX_RANK", os.environ.get("PMI_RANK")) == "1":
    os.system("sleep 600 & echo $! >process")
    os.kill(os.getpid(), 9)
import mn_comm
mn_comm.create_communicator("naive")
"""


def test_a_launcher_that_waits_for_what_a_dead_rank_has_started_is_ended(tmp_path):
    done = run_script(tmp_path, LEAVES_A_PROCESS, "-n", "2", "--restart", "0", seconds=60)
    os.kill(int((tmp_path / "process").read_text()), signal.SIGKILL)
    assert done.returncode != 0, done.stderr


def test_the_input_of_a_script_is_empty(tmp_path):
    done = run(tmp_path, "say('read', repr(sys.stdin.readline()))\ncount(5)", "-n", "1", "--restart", "0")
    assert done.returncode == 0, done.stderr
    assert "read ''" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_all_when_it_is_ended(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "count(1)\nsay('process', os.getpid())\nimport time\ntime.sleep(600)")
    command = [sys.executable, "-m", "mn_comm", "elastic", "-n", "2", str(script)]
    # A shell lets commands in the background ignore SIGINT, and so would the tests.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    processes = []
    for line in supervisor.stdout:
        if line.startswith("process"):
            processes.append(int(line.split()[1]))
        if len(processes) == 2:
            break
    supervisor.send_signal(number)
    assert supervisor.wait(30) == 128 + number
    supervisor.stdout.close()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{process}/cmdline") and is_alive(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_a_supervisor_nothing_is_kept(tmp_path):
    code = "import mn_elastic; m = mn_elastic.NodeMemory(); print(m.is_there, m.get()); m.put(1, {})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False None\n"
    assert "RuntimeError: expected a job started by chainermn elastic" in done.stderr


# Rank 1 kills itself before it has loaded anything of ours; or another process kills it, once it has begun to load MPI,
# or later, but before it ends.
AT_ONCE = "os.kill(os.getpid(), signal.SIGKILL)"
IN_MPI = """
    watch = "import os, sys; process = int(sys.argv[1])\\n"
    watch += "while 'libmpi' not in open(f'/proc/{process}/maps').read(): pass\\n"
    watch += "os.kill(process, 9)"
    subprocess.Popen([sys.executable, "-c", watch, str(os.getpid())])
"""
DIES_EARLY = """
import os, signal, subprocess, sys

attempt = int(os.environ["CHAINERMN_SUPERVISOR"].split()[-1])
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
if attempt == 1 and rank == "1":
    {how}

import mn_comm
import mn_elastic

comm = mn_comm.create_communicator("naive")
if attempt == 1 and rank == "1":
    signal.pause()
print(f"rank {{comm.rank}} of attempt {{attempt}} has come to the end\\n", end="", flush=True)
"""


@pytest.mark.parametrize("how", [AT_ONCE, IN_MPI], ids=["before it imports anything", "while it loads MPI"])
def test_a_rank_that_dies_before_it_has_a_communicator_does_not_leave_the_others_waiting(tmp_path, how):
    Path(tmp_path, "early.py").write_text(DIES_EARLY.format(how=how.strip()))
    done = run(tmp_path, "", "-n", "3", "early.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of attempt 2 has come to the end") == 3
    assert said(done)[-1] == "the training is complete, after 1 restart"
