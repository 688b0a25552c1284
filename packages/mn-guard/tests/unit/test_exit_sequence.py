"""What happens at the end of a process happens in the listed order, whatever the order of registration was."""

import os
import subprocess
import sys

import pytest

from mn_guard import exit_sequence
from mn_guard.exit_sequence import Step, at_exit, registered

REVERSED = """
import os
from mn_guard.exit_sequence import Step, at_exit
for step in reversed(Step):
    at_exit(step, lambda step=step: print(step.name))
at_exit(Step.TASKS, lambda: 1 / 0)
at_exit(Step.TASKS, lambda: print("registered last"))
if os.fork() == 0:
    raise SystemExit  # a child is not a rank
os.wait()
"""


def test_the_order_is_that_of_the_table():
    job = subprocess.run([sys.executable, "-c", REVERSED], capture_output=True, text=True, check=True)
    steps = [step.name for step in Step]
    steps.insert(steps.index("TASKS"), "registered last")
    assert job.stdout.split("\n") == [*steps, ""]
    assert "ZeroDivisionError" in job.stderr  # the others were still called
    table = [line.split()[0] for line in exit_sequence.__doc__.splitlines() if line[:4].isupper()]
    assert table == [step.name for step in Step]


ON_RANKS = """
import sys
from mn_guard import exit_sequence
import mn_comm
comm = mn_comm.create_communicator("flat")
reducer = comm.gradient_reducer(background=True)
comm._contexts.background[1].put(lambda: None)
found = [step.name for step, _ in exit_sequence.registered()]
if comm.rank == 0:
    print(*dict.fromkeys(found))
    threads = __import__("threading").enumerate()
    print(*sorted(thread.name for thread in threads))
"""


def test_what_a_rank_registers():
    launcher = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    job = subprocess.run(
        [launcher, "-n", "2", sys.executable, "-c", ON_RANKS], capture_output=True, text=True, timeout=60
    )
    assert job.stdout.split("\n")[0] == "STATUS TASKS LEFTOVERS FAREWELL FINISHED", job.stderr


ASKED = """
import sys
from mn_guard import exit_sequence
from mn_guard.exit_sequence import Step, at_exit
at_exit(Step.STATUS, lambda: print("status", exit_sequence.statuses))
at_exit(Step.TASKS, lambda: sys.exit(3))
at_exit(Step.FINISHED, lambda: print("finished"))
"""


def test_a_status_that_a_step_asks_for_counts_like_any_other():
    job = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True)
    assert (job.stdout.splitlines(), job.stderr) == (["status []", "status [3]", "finished"], "")


def test_nothing_of_the_parent_is_called_in_a_child(monkeypatch):
    monkeypatch.setattr(exit_sequence, "_registered", [(Step.TASKS, os.getpid() + 1, pytest.fail)])
    at_exit(Step.STATUS, print)
    assert registered() == [(Step.STATUS, print)]
