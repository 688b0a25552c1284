"""The supervisor with ranks that continue without others, and with ranks that do not."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import starving
from supervised import run

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
