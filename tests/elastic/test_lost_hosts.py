"""A host of a training is lost, with Open MPI: the other ranks continue, or `chainermn elastic` restarts the job."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.rest


@pytest.mark.parametrize(
    ("loss", "ranks"),
    # If only the daemon was lost, the host still responds, and is used again.
    [("ranks", 2), ("daemon", 4), ("link", 2), ("machine", 2)],
)
def test_the_training_comes_to_its_end(check_lost_host, loss, ranks):
    check_lost_host(loss, ranks)


HELLO = """
import os
from mn_comm import create_communicator
comm = create_communicator("two_dimensional")
place = f"rank {comm.rank}: rank {comm.intra_rank} on host {comm.inter_rank} of {comm.inter_size}"
print(f"{place}, {os.environ['OMPI_MCA_mpi_ft_enable']}", flush=True)
"""


def test_ranks_are_on_the_hosts_that_they_are_meant_for(virtual_cluster):
    options = ["--hosts", "1,2", "--mpiexec", "mpiexec --with-ft ulfm"]
    job = subprocess.run(
        [sys.executable, virtual_cluster.__file__, *options, "--", sys.executable, "-c", HELLO],
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    places = ["rank 0: rank 0 on host 0", "rank 1: rank 0 on host 1", "rank 2: rank 1 on host 1"]
    assert sorted(job.stdout.splitlines()) == [f"{place} of 2, 1" for place in places]
