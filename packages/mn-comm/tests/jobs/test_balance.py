"""Who reads how much while gradients are averaged: all ranks of a node share the adding up, and nobody the reading."""

import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import numpy as np
from mpi4py import MPI

import mn_comm
from mn_comm import collectives
from mn_comm.gradients import bucket

sys.path.insert(0, sys.argv[1])
from fake_model import Model, Param

world = MPI.COMM_WORLD
MPI.Get_processor_name = lambda: f"node{world.rank // 3}"
read = 0


def counted(function, of):
    def call(*args):
        global read
        read += of(*args)
        return function(*args)

    return call


bucket.add_up = counted(bucket.add_up, lambda summands, total: sum(each.nbytes for each in summands))
collectives.mean_in_place = counted(collectives.mean_in_place, lambda ranks, share: share.nbytes)
bucket.divide = counted(bucket.divide, lambda array, divisor, out: array.nbytes)

comm = mn_comm.create_communicator(sys.argv[2])
model = Model(**{f"p{i}": Param(np.zeros(300_000, "f4"), np.full(300_000, world.rank, "f4")) for i in range(10)})
comm.multi_node_mean_grad(model)
assert all((param.grad == 2.5).all() for param in model.params.values())
read = np.array(world.allgather(read))
assert read.min() >= 12_000_000, read
if world.rank == 0:
    print("read", read.max() / read.mean())
"""


@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional"])
def test_no_rank_of_a_node_reads_much_more_than_the_others(name):
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    fakes = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "fakes")
    job = subprocess.run(
        [mpiexec, "-n", "6", sys.executable, "-c", SCRIPT, fakes, name],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"},
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert float(job.stdout.split("read")[1]) <= 1.5
