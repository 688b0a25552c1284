"""The supervisor with ranks that continue without others, and with ranks that do not."""

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import starving
from supervised import IMPATIENT, changed, run, run_script

IF_IT_IS_RANK_1 = "if attempt == 1 and step == 25 and first_rank == 1"


@pytest.mark.parametrize("end", ["die()", "sys.exit(3)"])
def test_where_others_go_on_nothing_is_started_again(launcher, tmp_path, end):
    done = run(tmp_path, f"count(40, lambda step: {end} {IF_IT_IS_RANK_1} else None)", "-n", "3", arguments=["elastic"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ends with 40") == 2
    assert done.stderr.rstrip().endswith("the training is complete")


def test_where_none_goes_on_it_is_started_again(launcher, tmp_path):
    die = "lambda step: die() if attempt == 1 and step == 25 else None"
    done = run(tmp_path, f"count(40, {die})", "-n", "2", arguments=["elastic"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 2 of 2 begins at 20 with 20") == 2
    assert done.stderr.rstrip().endswith("the training is complete, after 1 restart")


def test_where_all_fail_it_gives_up_with_their_status(launcher, tmp_path):
    done = run(tmp_path, "count(10)\nsys.exit(3)", "-n", "2", "--restart", "0", arguments=["elastic"])
    assert done.returncode == 3, done.stderr
    assert done.stderr.rstrip().endswith("giving up: it was started 1 times")


def test_ranks_that_cannot_go_on_are_started_again(launcher, tmp_path):
    die = f"lambda step: die() {IF_IT_IS_RANK_1} else None"
    done = run(tmp_path, f"count(40, {die})", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 2 of 2 begins at 20 with 20") == 2


# How a rank ends in MPI_Init if the first heartbeat of another comes too early (Open MPI 5.0.11): see the last test.
CRASH = "Failing at address: (nil)"

STOPS = """
comm.barrier()
if first_rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
count(30)
"""


def test_a_rank_that_is_stopped_is_taken_to_be_dead(launcher, tmp_path):
    done = run(tmp_path, STOPS, "-n", "3", "--detect", "2", arguments=["elastic"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ends with 30") == 2
    assert "lost rank 1 of 3, 2 continue" in done.stderr


def test_no_more_than_half_of_the_ranks_do_not_go_on(launcher, tmp_path):
    options = ["-n", "2", "--detect", "2", "--restart", "0"]
    while CRASH in (done := run(tmp_path, STOPS, *options, arguments=["elastic"])).stderr:
        pass
    assert done.returncode == 1, done.stderr
    assert "only 1 of 2 ranks are left, not more than half, with failure detection" in done.stderr


# The thread in which rank 1 learns that all ranks have come so far in MPI_Init gets hardly any time. Rank 0 is ahead,
# and its first heartbeat mostly reaches a rank that cannot receive one yet, and that crashes.
STARVES = f"""
import os, subprocess, sys

if os.environ["OMPI_COMM_WORLD_RANK"] == "1" and os.environ["CHAINERMN_SUPERVISOR"].split()[-1] == "1":
    command = [sys.executable, {starving.__file__!r}, str(os.getpid())]
    starving = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    starving.stdout.readline()
"""


def test_a_heartbeat_that_comes_too_early_costs_only_an_attempt(launcher, tmp_path):
    done = run(tmp_path, "count(30)", "-n", "2", "--detect", "2", before=STARVES, arguments=["elastic"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ends with 30") == 2
    assert "attempt 2" in done.stderr or CRASH not in done.stderr


# A rank starts one program after another. They use TCP: Open MPI's mpiexec deletes the shared memory of one that has
# ended, sometimes so late that it deletes that of the next.
STARTS_OTHERS = """
import os, subprocess, sys, time

os.environ["OMPI_MCA_btl"] = "self,tcp"
os.environ["OMPI_MCA_btl_tcp_if_include"] = "127.0.0.0/8"

def start(code, **environ):
    code = "import sys, time, mn_comm; comm = mn_comm.create_communicator('naive'); " + code
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environ}).returncode

ALONE = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM_", "OMPI_MCA_", "PMIX_"))}
"""
OTHER_JOB = """
["mpiexec", "--map-by", ":oversubscribe", "-n", "3",
 sys.executable, "-c", "import mn_comm; mn_comm.create_communicator('naive')"]
"""
AND_FAILS = "time.sleep(0.6); sys.exit(3)"
FAILS_LATER = {
    "in its second child": f"start(''); sys.exit(start({AND_FAILS!r}))",
    "after its child": f"start(''); {AND_FAILS}",
    "itself, after its child": f"start(''); import mn_comm; comm = mn_comm.create_communicator('naive'); {AND_FAILS}",
    "itself, beside a child that is a job of its own": f"""
import mn_comm
comm = mn_comm.create_communicator("naive")
if comm.rank == 0:
    os.environ.clear()
    start("", **ALONE)
comm.barrier()
{AND_FAILS}
""",
    "itself, beside another job": f"""
import mn_comm
comm = mn_comm.create_communicator("naive")
if comm.rank == 0:
    subprocess.run({OTHER_JOB.strip()}, env=ALONE, check=True)
comm.barrier()
{AND_FAILS}
""",
}


def test_the_status_of_a_slow_launcher_is_waited_for_if_only_it_knows_it(launcher, tmp_path):
    slow = tmp_path / "mpiexec"
    slow.write_text(f'#!/bin/sh\n"{launcher}" "$@"\nstatus=$?\n[ "$1" = --version ] || sleep 0.6\nexit $status\n')
    slow.chmod(0o755)
    body = STARTS_OTHERS + FAILS_LATER["after its child"]
    done = run_script(tmp_path, body, "-n", "2", "--restart", "0", "--mpiexec", str(slow), program=("-c", IMPATIENT))
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize("body", FAILS_LATER.values(), ids=FAILS_LATER)
def test_what_a_rank_has_started_does_not_end_the_training(launcher, tmp_path, body):
    done = run_script(tmp_path, STARTS_OTHERS + body, "-n", "2", "--restart", "0", program=("-c", IMPATIENT))
    assert done.returncode == 3, done.stderr
    assert "the training is complete" not in done.stderr


# It leaves without MPI_Finalize, when no rank needs it any more: MPI may report its loss to a rank that still does.
LEAVES = """
import os
comm.barrier()
open(f"left{comm.rank}", "w").close()
while not all(os.path.exists(f"left{rank}") for rank in range(comm.size)):
    time.sleep(0.01)
os._exit(0)
"""
HELPED = {
    "": "status = start('comm.barrier()')",
    "in a job of its own": f"status = subprocess.run({OTHER_JOB.strip()}, env=ALONE).returncode",
    "before a helper": f"status = start('comm.barrier()'); start({LEAVES!r})",
}


@pytest.mark.parametrize("body", HELPED.values(), ids=HELPED)
def test_a_script_may_start_the_training(launcher, tmp_path, body):
    body += "\ntime.sleep(0.6); sys.exit(status)"
    done = run_script(tmp_path, STARTS_OTHERS + body, "-n", "2", "--restart", "0", program=("-c", IMPATIENT))
    assert done.returncode == 0, done.stderr
    assert done.stderr.rstrip().endswith("the training is complete")


# The launcher of one rank's job ends long after that of the other's.
ENDS_LATE = f"""
{HELPED["in a job of its own"]}
time.sleep(0.5 + 1.5 * (os.environ["OMPI_COMM_WORLD_RANK"] == "1"))
sys.exit(status)
"""


def test_scripts_that_start_trainings_may_end_at_different_times(launcher, tmp_path):
    program = "-c", changed("supervisor._EARLY_SECONDS = 0.2")
    done = run_script(tmp_path, STARTS_OTHERS + ENDS_LATE, "-n", "2", "--restart", "0", program=program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.rstrip().endswith("the training is complete")


CLOSES = """
import os, time
os.closerange(3, 100)
time.sleep(2)
import mn_comm
mn_comm.create_communicator("naive")
"""


def test_a_rank_may_close_its_descriptors(launcher, tmp_path):
    done = run_script(tmp_path, CLOSES, "-n", "1", "--restart", "0")
    assert done.returncode == 0, done.stderr


PRINTS = """
import mn_comm
mn_comm.create_communicator("naive")
print("x" * 300_000, flush=True)
"""


READS_LATE = """
import subprocess, sys, time
job = subprocess.Popen([sys.executable, "-c", {!r}, *sys.argv[1:]], stdout=subprocess.PIPE)
time.sleep(4)
print(len(job.stdout.read()))
sys.exit(job.wait())
"""


def test_what_is_read_late_is_not_lost(launcher, tmp_path):
    reads_late = READS_LATE.format(changed("supervisor._LAUNCHER_SECONDS = 2"))
    done = run_script(tmp_path, PRINTS, "-n", "2", "--restart", "0", program=("-c", reads_late))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 600_000


# What it has started holds all that it has opened, also after its end.
LEAVES_A_PROCESS = """
import os
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.system("sleep 600 </dev/null >/dev/null 2>&1 & echo $! >process")
    {then}
import mn_comm
mn_comm.create_communicator("naive")
"""


@pytest.mark.parametrize("dies", [False, True])
def test_the_end_of_a_rank_is_noticed_although_what_it_has_started_is_alive(launcher, tmp_path, dies):
    body = LEAVES_A_PROCESS.format(then="os.kill(os.getpid(), 9)" if dies else "pass")
    done = run_script(tmp_path, body, "-n", "2", "--restart", "0", program=("-c", IMPATIENT))
    os.kill(int((tmp_path / "process").read_text()), signal.SIGKILL)
    assert done.returncode == int(dies), done.stderr
    assert ("rank 1 has ended before it had made a communicator" in done.stderr) == dies


# On Python 3.11 and older, only the launcher gets the status: Python has looked up sys.exit before it calls main.
FAILS_AROUND_MAIN = """
import sys

def main():
    import mn_comm
    mn_comm.create_communicator("naive")
    return 3

sys.exit(main())
"""


def test_a_status_counts_of_which_the_ranks_do_not_know(launcher, tmp_path):
    done = run_script(tmp_path, FAILS_AROUND_MAIN, "-n", "2", "--restart", "0")
    assert done.returncode == 3, done.stderr


LOSES_THE_LAUNCHER = """
import os, time
from mn_guard.job import LAUNCHERS, name_and_parent

attempt = int(os.environ["CHAINERMN_SUPERVISOR"].split()[-1])
try:
    while attempt == 1 and name_and_parent(parent := os.getppid())[0] in LAUNCHERS:
        os.kill(parent, 9)
        time.sleep(0.01)
except OSError:  # it has just ended
    pass
"""
# The ranks of the first attempt begin only when their launcher is dead, and so they are not ended with it.
BEGINS_LATE = f"""{LOSES_THE_LAUNCHER}
import sys
from mn_guard.supervised import start

if attempt == 1:
    time.sleep(1)
start.main(sys.argv[1:])
"""
TRAINS_BESIDE = """
import os, time

if os.environ["CHAINERMN_SUPERVISOR"].split()[-1] == "1":
    while not os.path.exists("second"):
        time.sleep(0.01)
    time.sleep(1)
    open("trained", "w").close()
import mn_comm
mn_comm.create_communicator("naive")
open("second", "w").close()
time.sleep(2)
"""


def test_a_rank_of_an_attempt_that_is_over_does_not_train(launcher, tmp_path):
    (tmp_path / "late.py").write_text(BEGINS_LATE)
    program = changed("launch.start.__file__ = 'late.py'", "supervisor._LAUNCHER_SECONDS = 0.2")
    done = run_script(tmp_path, TRAINS_BESIDE, "-n", "2", program=("-c", program))
    assert done.returncode == 0, done.stderr
    assert done.stderr.rstrip().endswith("the training is complete, after 1 restart")
    assert not (tmp_path / "trained").exists()


SAVES_AT_THE_END = """
import atexit, os, time

def save():
    while not os.path.exists("said"):
        time.sleep(0.01)
    if comm.rank == 0:
        open("saved", "w").close()

atexit.register(save)  # before ours, and so it is called after them
import mn_comm
comm = mn_comm.create_communicator("naive")
"""


TELLS_THE_SCRIPT = """
say = supervisor._say
def say_to_all(text):
    say(text)
    if "have not ended" in text:
        open("said", "w").close()
supervisor._say = say_to_all
"""


def test_what_a_script_has_left_for_its_end_is_waited_for(launcher, tmp_path):
    program = changed(TELLS_THE_SCRIPT, "supervisor._LAUNCHER_SECONDS = 0.2")
    done = run_script(tmp_path, SAVES_AT_THE_END, "-n", "2", "--restart", "0", program=("-c", program))
    assert done.returncode == 0, done.stderr
    assert "ranks have not ended after the end of the training; it ends after 300 s" in done.stderr
    assert (tmp_path / "saved").exists()


NEVER_ENDS = """
import atexit, time
atexit.register(time.sleep, 600)
import mn_comm
mn_comm.create_communicator("naive")
"""


def test_ranks_that_do_not_end_are_ended(launcher, tmp_path):
    program = changed("supervisor._EXIT_SECONDS = 0.2")
    done = run_script(tmp_path, NEVER_ENDS, "-n", "2", "--restart", "0", program=("-c", program))
    assert done.returncode == 0, done.stderr
    assert done.stderr.rstrip().endswith("the training is complete")


def test_a_script_whose_training_does_not_end_is_ended(launcher, tmp_path):
    body = f"sys.exit(subprocess.run([sys.executable, '-c', {NEVER_ENDS!r}]).returncode)"
    program = changed("supervisor._EXIT_SECONDS = 0.2")
    done = run_script(tmp_path, STARTS_OTHERS + body, "-n", "2", "--restart", "0", program=("-c", program))
    assert done.returncode == 1, done.stderr
    assert "programs that ranks have started have not ended after the end of the training" in done.stderr


def test_ranks_that_have_lost_their_launcher_are_no_training(launcher, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Then each rank is rank 0 of a job of its own, or is ended before.
    body = "import mn_comm; mn_comm.create_communicator('naive')"
    done = run_script(tmp_path, LOSES_THE_LAUNCHER + body, "-n", "2")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("ompi.[0-9]*"))
    assert "attempt 1 has failed: " in done.stderr
    assert done.stderr.rstrip().endswith("the training is complete, after 1 restart")
