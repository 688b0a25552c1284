"""Data longer than 2**31 bytes or elements, which old MPI interfaces cannot count."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.rest

SCRIPT = """
import numpy as np
from mn_comm import create_communicator

comm = create_communicator("flat")
length = 2**31 + 7
data = np.zeros(length, np.uint8) if comm.rank == 0 else None
if comm.rank == 0:
    data[-1] = 42
received = comm.bcast(data)
assert received.shape == (length,) and received[-1] == 42

if comm.rank == 0:
    comm.send(data, 1)
    comm.send_obj({"large": data}, 1)
else:
    del received
    assert comm.recv(0)[-1] == 42
    assert comm.recv_obj(0)["large"][-1] == 42
del data

received = comm.bcast_obj({"large": np.full(length, 7, np.uint8)} if comm.rank == 0 else None)
assert received["large"].shape == (length,) and received["large"][-1] == 7
del received

total = comm.allreduce(np.ones(length, np.int8))
assert total.shape == (length,) and (total[-3:] == 2).all() and (total[:3] == 2).all()
print("rank", comm.rank, "done")
"""


def room():
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return available * 1024


@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux" or room() < 16 * 2**30, reason="needs 16 GiB of free memory")
def test_more_than_two_to_the_31():
    job = subprocess.run(
        [shutil.which("mpiexec", path=os.path.dirname(sys.executable)), "-n", "2", sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("done") == 2
