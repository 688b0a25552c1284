"""A job in which one rank never starts MPI, so that the others wait in MPI_Init."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mn_guard.starting import watched_start

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
SCRIPT = """
import os, signal
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    signal.pause()
import mn_comm
mn_comm.create_communicator("naive")
"""


@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec beside Python")
def test_a_rank_that_waits_in_mpi_init_says_so_and_ends_the_job_if_asked_to():
    environ = {**os.environ, "CHAINERMN_STALL_SECONDS": "2", "CHAINERMN_STALL_ABORT": "1"}
    command = [MPIEXEC, "-n", "2", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode != 0
    assert "[chainermn] rank 0 of 2 (" in done.stderr
    assert "has waited for 2 s in MPI_Init; a rank has not reached it" in done.stderr


@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec beside Python")
def test_a_rank_that_waits_for_its_first_communicator_says_so_and_ends_the_job_if_asked_to():
    """The other one has started MPI, and waits in MPI_Finalize."""
    environ = {**os.environ, "CHAINERMN_STALL_SECONDS": "2", "CHAINERMN_STALL_ABORT": "1"}
    script = "from mpi4py import MPI; import sys, mn_comm; MPI.COMM_WORLD.rank and sys.exit(3); "
    command = [MPIEXEC, "-n", "2", sys.executable, "-c", script + "mn_comm.create_communicator('naive')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode != 0
    assert "[chainermn] rank 0 of 2 (" in done.stderr
    assert "ends the job: CHAINERMN_STALL_ABORT is set" in done.stderr


def test_nothing_stays_when_mpi_has_started_in_time(capfd):
    before = os.listdir("/proc/self/fd")
    with watched_start({"PMI_SIZE": "2", "PMI_RANK": "1"}):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert children
    assert not set(children) & set(os.listdir("/proc"))
    assert os.listdir("/proc/self/fd") == before
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("environ", [{}, {"PMI_SIZE": "1"}, {"PMI_SIZE": "2", "CHAINERMN_STALL_SECONDS": "0"}], ids=str)
def test_a_process_that_waits_for_no_other_starts_nothing(environ, monkeypatch):
    monkeypatch.delattr(os, "posix_spawn")
    with watched_start(environ):
        pass
