"""Ranks that leave a training with local or asynchronous steps in every possible way: no rank waits silently."""

import os
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.rest

SCRIPT = """
import os, signal, sys
import numpy as np
import mn_optim
import chainer, chainer.functions as F, chainer.links as L
from mn_comm import create_communicator
from mpi4py import MPI

MPI.COMM_WORLD.Barrier()  # starting may take longer than stalls may
os.environ.update(setting.split("=") for setting in sys.argv[2:])
comm = create_communicator("flat")
when = {
    "local": mn_optim.LocalSGD(2),
    "streaming": mn_optim.StreamingDiLoCo(2, fragments=2, delay=1),
    "asynchronous": mn_optim.Asynchronous(max_staleness=5, interval=0.001),
}[sys.argv[1]]
optimizer = mn_optim.MultiNodeOptimizer(chainer.optimizers.SGD(), comm, when)
model = L.Linear(3, 2)
optimizer.setup(model)


def train(n):
    for _ in range(n):
        optimizer.update(lambda: F.sum(model(np.ones((4, 3), "f4"))))


train(3 + 4 * comm.rank)
"""

ENDINGS = {
    "exception": "if comm.rank == 0:\n    raise ArithmeticError('it broke')\ntrain(1000)",
    "exit": "if comm.rank == 0:\n    sys.exit(3)\ntrain(10)\nsys.exit(3)",
    "interrupt": "if comm.rank == 0:\n    os.kill(os.getpid(), signal.SIGINT)\ntrain(100000)",
    "killed": "if comm.rank == 0:\n    os.kill(os.getpid(), signal.SIGKILL)\ntrain(1000)",
    "nothing": "",
    "late": "train(50 * comm.rank)",
    "exit alone": "if comm.rank == 0:\n    sys.exit(3)\ntrain(10**9)",
    "message alone": "if comm.rank == 0:\n    sys.exit('it broke')\ntrain(10**9)",
}


def run(scheme, ending, *settings, **environ):
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    return subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-c", SCRIPT + ENDINGS[ending], scheme, *settings],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("scheme", ["local", "streaming", "asynchronous"])
@pytest.mark.parametrize("ending", ["exception", "interrupt", "killed"])
def test_the_job_ends_with_a_rank_that_dies(scheme, ending):
    job = run(scheme, ending)
    assert job.returncode != 0
    if ending == "exception":
        assert "ArithmeticError: it broke" in job.stderr


@pytest.mark.parametrize("scheme", ["local", "streaming", "asynchronous"])
def test_the_job_ends_with_the_status_of_a_rank_while_the_others_go_on(scheme):
    job = run(scheme, "exit alone")
    assert job.returncode == 3, job.stderr
    assert "exit status 3 on rank 0" in job.stderr
    job = run(scheme, "message alone")
    assert job.returncode == 1
    assert "it broke" in job.stderr


@pytest.mark.parametrize("ending", ["exit", "nothing", "late"])
def test_a_script_may_end_without_synchronizing_asynchronous_ranks(ending):
    job = run("asynchronous", ending)
    assert job.returncode == (3 if ending == "exit" else 0), job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize("scheme", ["local", "streaming"])
def test_a_rank_that_does_not_synchronize_at_its_end_is_not_waited_for_in_silence(scheme):
    job = run(scheme, "late", "CHAINERMN_STALL_SECONDS=1")
    assert job.returncode != 0
    assert re.search(
        r"^\[chainermn\] rank 1 of 2 \(\S+\) has waited for \S+ s in .* for a meeting of local steps", job.stderr, re.M
    ), job.stderr
    assert "ends the job: rank 0 has reached the end of its program" in job.stderr


SEVERAL = """
others = []
for _ in range(3):
    other = mn_optim.MultiNodeOptimizer(chainer.optimizers.SGD(), comm, when).setup(model.copy("copy"))
    other.assume_synchronized()
    others.append(other)
for other in others:
    other.update(lambda: F.sum(other.target(np.ones((4, 3), "f4"))))
if comm.rank == 0:
    others.reverse()  # garbage is collected when and in what order each rank likes
    others.pop()
print("done")
"""


def test_a_script_may_end_with_several_of_them(monkeypatch):
    monkeypatch.setitem(ENDINGS, "several", SEVERAL)
    job = run("asynchronous", "several")
    assert (job.returncode, sorted(job.stdout)) == (0, sorted("done\ndone\n")), job.stderr


FORKS = """
from multiprocessing import Process

def child():
    os._exit(7)

for _ in range(5):
    process = Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 7, process.exitcode
    train(20)
optimizer.synchronize()
"""


def test_processes_that_are_forked_meanwhile(monkeypatch):
    monkeypatch.setitem(ENDINGS, "forks", FORKS)
    job = run("asynchronous", "forks", PYTHONWARNINGS="ignore::DeprecationWarning")
    assert job.returncode == 0, job.stderr
