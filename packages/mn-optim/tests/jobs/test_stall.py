"""A rank that takes one step less than the others, while gradients are sent during the computation."""

import os
import re
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
import numpy as np
import mn_optim
import chainer, chainer.functions as F, chainer.links as L
from mn_comm import create_communicator
from mn_guard import guard_thread, stall
from mpi4py import MPI

MPI.COMM_WORLD.Barrier()  # starting may take longer than stalls may
os.environ.update(CHAINERMN_STALL_SECONDS="1")
comm = create_communicator("flat")
when = getattr(mn_optim, sys.argv[1])()
optimizer = mn_optim.MultiNodeOptimizer(chainer.optimizers.SGD(), comm, when)
model = L.Linear(3, 2)
optimizer.setup(model)
for step in range(5):
    if step == 4:
        comm.barrier()
        # Not before, when a rank may only be late; nor on rank 1, for which rank 0 may be late.
        guard_thread.thread.find(stall.Monitor).abort = sys.argv[2] == "meet" and comm.rank == 0
    if step < 4 or comm.rank == 0:
        optimizer.update(lambda: F.sum(model(np.ones((4, 3), "f4"))))
if sys.argv[2] == "meet":
    comm.allreduce_obj(1)
"""


@pytest.mark.parametrize("then", ["meet", "end"])
@pytest.mark.parametrize("when", ["DuringBackward", "OneStepLate"])
def test_a_step_less_is_not_waited_for_in_silence(when, then):
    job = subprocess.run(
        [
            shutil.which("mpiexec", path=os.path.dirname(sys.executable)),
            *("-n", "2", sys.executable, "-c", SCRIPT, when, then),
        ],
        capture_output=True,
        text=True,
        timeout=70,
    )
    assert job.returncode != 0
    assert re.search(
        r"^\[chainermn\] rank 0 of 2 \(\S+\) has waited for \S+ s in Iallreduce for gradients, ", job.stderr, re.M
    ), job.stderr
    why = "rank 1 has reached the end of its program" if then == "end" else "CHAINERMN_STALL_ABORT is set"
    assert f"rank 0 ends the job: {why}" in job.stderr
