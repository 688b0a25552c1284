"""What docs/slurm.md says, on a Slurm cluster of two virtual nodes, with the MPI library at hand.

Skipped where there is no Slurm.
"""

import pytest
from mpi4py import MPI
from slurm_jobs import PAGE

pytestmark = pytest.mark.timeout(240)

IS_OPENMPI = "Open MPI" in MPI.Get_library_version()
KIND = "pmix" if IS_OPENMPI else "pmi2"
SCRIPT = "train.sbatch" if IS_OPENMPI else "train-mpich.sbatch"
LAUNCHERS = ["srun --mpi=pmix" if IS_OPENMPI else "env MPIR_CVAR_CH4_NETMOD=ofi srun --mpi=pmi2", "mpiexec"]

ENDLESS = """
import chainermn

comm = chainermn.create_communicator()
while True:
    if comm.allreduce_obj(1) and comm.rank == 0:
        print("begun", flush=True)
"""
ONE_OF_AN_ARRAY = """
import os

import chainermn

comm = chainermn.create_communicator()
if comm.rank == 0:
    print("task", os.environ["SLURM_ARRAY_TASK_ID"], comm.size, comm.inter_size)
"""
HELLO = """
import chainermn

comm = chainermn.create_communicator()
print(f"rank {comm.rank} of {comm.size}, host {comm.inter_rank} of {comm.inter_size}")
"""
SURVIVE = """
import time

import chainer
import chainermn
import numpy as np

comm = chainermn.create_communicator()
model = chainer.links.Classifier(chainer.links.Linear(64, 10))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(model)
data = chainer.datasets.TupleDataset(np.ones((64, 64), "f"), np.zeros(64, "i"))
iterator = chainermn.iterators.ElasticIterator(data, 8, comm, seed=0)
updater = chainer.training.StandardUpdater(iterator, optimizer)
trainer = chainer.training.Trainer(updater, (200, "iteration"))
keeper = chainermn.extensions.create_memory_keeper(comm)
trainer.extend(keeper, trigger=(10, "iteration"))


@trainer.extend
@chainer.training.make_extension(trigger=(1, "iteration"))
def tell(trainer):
    time.sleep(0.05)
    if comm.rank == 0 and trainer.updater.iteration % 50 == 0:
        print("iteration", trainer.updater.iteration, "ranks", comm.size, flush=True)


resumed = keeper.maybe_load(trainer)
if comm.rank == 0:
    print("resumed at", resumed, flush=True)
trainer.run()
if comm.rank == 0:
    print("done, ranks", comm.size, flush=True)
"""


@pytest.fixture
def kind(slurm):
    """Skip the test if this Slurm cannot start processes in the way that the MPI library needs."""
    if KIND not in slurm.kinds_of_mpi():
        pytest.skip(f"no {KIND} in this Slurm")


@pytest.mark.usefixtures("kind")
def test_the_batch_script(slurm):
    slurm.copy("train.py")
    job = slurm.submit("--ntasks-per-node=2", "--cpus-per-task=1", PAGE / SCRIPT)
    assert job.wait() == "COMPLETED", job.log
    assert (slurm.folder / "result" / "log").exists()


def test_mpiexec_in_a_batch_script(slurm):
    slurm.write("hello.py", HELLO)
    job = slurm.submit("--nodes=2", "--ntasks-per-node=2", "--wrap=mpiexec python hello.py")
    assert job.wait() == "COMPLETED", job.log
    assert sorted(job.log.splitlines()) == [f"rank {rank} of 4, host {rank // 2} of 2" for rank in range(4)]


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_is_cancelled_ends_on_all_nodes(slurm, launcher):
    slurm.write("endless.py", ENDLESS)
    job = slurm.submit("--nodes=2", "--ntasks-per-node=2", f"--wrap={launcher} python endless.py")
    job.wait_for("begun")
    slurm.call("scancel", job.number)
    assert job.wait() == "CANCELLED", job.log
    assert not slurm.processes("endless.py")


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_array_of_jobs(slurm, launcher):
    slurm.write("one.py", ONE_OF_AN_ARRAY)
    job = slurm.submit("--array=0-2", "--nodes=2", "--ntasks-per-node=1", f"--wrap={launcher} python one.py")
    assert job.wait() == "COMPLETED", job.log
    assert sorted(job.log.splitlines()) == [f"task {i} 2 2" for i in range(3)]


@pytest.mark.usefixtures("kind")
def test_a_training_that_reaches_its_time_limit_is_queued_again_and_resumes(slurm):
    slurm.copy("train.py")
    slurm.write("again.sbatch", (PAGE / "train-again.sbatch").read_text().replace("--mpi=pmi2", f"--mpi={KIND}"))
    options = ["--ntasks-per-node=1", "--cpus-per-task=1", "--time=1", "--signal=TERM@55"]
    job = slurm.submit(*options, "again.sbatch", "--epoch", "1000000")
    job.wait_for("stopped at iteration")
    stopped = int(job.log.split("stopped at iteration ")[1].split()[0])
    job.wait_for("\nqueued again: there are checkpoints in result/train.*")
    job.wait_for(f"resumed at iteration {stopped}")
    slurm.call("scancel", job.number)
    assert job.wait() == "CANCELLED", job.log


def test_the_doctor_reaches_the_nodes_through_slurm(slurm):
    slurm.copy("reach-node")
    hosts = "$(scontrol show hostnames | paste -sd,)"
    job = slurm.submit(
        "--nodes=2", "--ntasks-per-node=1", f"--wrap=chainermn doctor --hosts {hosts} --ssh ./reach-node"
    )
    assert job.wait() == "COMPLETED", job.log
    assert "2 ranks on " in job.log


def test_a_node_is_lost_under_the_supervisor(slurm):
    slurm.copy("reach-node")
    slurm.write("survive.py", SURVIVE)
    hosts = '$(scontrol show hostnames | sed "s/$/:1/" | paste -sd,)'
    command = f"chainermn elastic -n 2 --hosts {hosts} --min 1 --ssh ./reach-node survive.py"
    job = slurm.submit("--no-kill", "--nodes=2", "--ntasks-per-node=1", f"--wrap={command}")
    job.wait_for("iteration 50 ranks 2")
    lost = slurm.lose_a_node()
    try:
        job.wait_for("done, ranks 1")
        resumed = int(job.log.rpartition("resumed at ")[2].split()[0])
        assert resumed >= 40  # the node may be lost before the state of this iteration is kept
        assert job.wait() == "COMPLETED", job.log
    finally:
        slurm.bring_back(lost)
