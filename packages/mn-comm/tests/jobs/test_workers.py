"""A process that creates a communicator while MPI is not running gets an explanation; MPI would only end it."""

import os
import shutil
import subprocess
import sys

import pytest

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
UNGUARDED = """
import multiprocessing
from mn_comm import create_communicator
comm = create_communicator("naive")
worker = multiprocessing.get_context("spawn").Process(target=print)
worker.start()
worker.join()
comm.barrier()
"""
NOT_INITIALIZED = """
import mpi4py
mpi4py.rc.initialize = False
from mn_comm import create_communicator
create_communicator("naive")
"""
FINALIZED = """
from mpi4py import MPI
from mn_comm import create_communicator
MPI.Finalize()
create_communicator("naive")
"""


def run(tmp_path, script):
    path = tmp_path / "train.py"
    path.write_text(script)
    return subprocess.run([MPIEXEC, "-n", "2", sys.executable, path], capture_output=True, text=True, timeout=60)


def test_a_worker_that_imports_the_script_again(tmp_path):
    job = run(tmp_path, UNGUARDED)
    assert job.returncode == 0, job.stderr
    assert 'put the call under `if __name__ == "__main__":`' in job.stderr


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (NOT_INITIALIZED, "RuntimeError: expected MPI to be initialized, got mpi4py.rc.initialize = False"),
        (FINALIZED, "RuntimeError: expected MPI to run, but MPI.Finalize() has been called"),
    ],
)
def test_mpi_that_does_not_run(tmp_path, script, reason):
    job = run(tmp_path, script)
    assert job.returncode == 1, job.stderr
    assert reason in job.stderr
