"""What docs/slurm.md says, on a Slurm cluster of two virtual nodes, with Open MPI; skipped where there is no Slurm."""

import pytest
from slurm_jobs import PAGE

pytestmark = pytest.mark.timeout(240)

HELLO = """
import chainermn

comm = chainermn.create_communicator()
print(f"rank {comm.rank} of {comm.size}, host {comm.inter_rank} of {comm.inter_size}")
"""


@pytest.fixture
def pmix(slurm):
    """Skip the test if this Slurm cannot start processes by PMIx."""
    if "pmix" not in slurm.kinds_of_mpi():
        pytest.skip("no PMIx in this Slurm")


@pytest.mark.usefixtures("pmix")
def test_the_batch_script(slurm):
    slurm.copy("train.py")
    job = slurm.submit("--ntasks-per-node=2", "--cpus-per-task=1", PAGE / "train.sbatch")
    assert job.wait() == "COMPLETED", job.log
    assert (slurm.folder / "result" / "log").exists()


def test_mpiexec_in_a_batch_script(slurm):
    slurm.write("hello.py", HELLO)
    job = slurm.submit("--nodes=2", "--ntasks-per-node=2", "--wrap=mpiexec python hello.py")
    assert job.wait() == "COMPLETED", job.log
    assert sorted(job.log.splitlines()) == [f"rank {rank} of 4, host {rank // 2} of 2" for rank in range(4)]


@pytest.mark.usefixtures("pmix")
def test_a_training_that_reaches_its_time_limit_is_queued_again_and_resumes(slurm):
    slurm.copy("train.py")
    script = (PAGE / "train-again.sbatch").read_text().replace("--mpi=pmi2", "--mpi=pmix")
    slurm.write("again.sbatch", script.replace("export OMP", "export PMIX_MCA_psec=native\nexport OMP"))
    options = ["--ntasks-per-node=1", "--cpus-per-task=1", "--time=1", "--signal=TERM@55"]
    job = slurm.submit(*options, "again.sbatch", "--epoch", "1000000")
    job.wait_for("stopped at iteration")
    stopped = int(job.log.split("stopped at iteration ")[1].split()[0])
    job.wait_for(f"resumed at iteration {stopped}")
    slurm.call("scancel", job.number)
    assert job.wait() == "CANCELLED", job.log
