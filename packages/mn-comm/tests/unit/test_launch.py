import pytest

from mn_comm.basis.launch import check_launch

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@host"
MPICH = "MPICH Version:      5.0.1\nMPICH Release date: today"
MISTAKES = [
    (
        OPEN_MPI,
        {"PMI_SIZE": "2", "PMI_RANK": "0"},
        "PMI_SIZE",
        r"2 processes.+\(Open MPI v5.0.11\) are different.+Use the mpiexec",
    ),
    (OPEN_MPI, {"SLURM_STEP_NUM_TASKS": "16"}, "SLURM_STEP_NUM_TASKS", "16 processes.+Use srun --mpi=pmix"),
    (MPICH, {"SLURM_STEP_NUM_TASKS": "16"}, "SLURM_STEP_NUM_TASKS", r"\(MPICH Version: 5.0.1\).+Use srun --mpi=pmi2"),
    (MPICH, {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, "OMPI_COMM_WORLD_SIZE", "4 processes"),
]


@pytest.mark.parametrize(("library", "environ", "name", "message"), MISTAKES)
def test_a_process_that_is_alone_by_mistake(library, environ, name, message):
    with pytest.raises(RuntimeError, match=message) as caught:
        check_launch(1, library, environ)
    assert f"says in {name}, got 1" in str(caught.value)
    check_launch(2, library, environ)
    check_launch(1, library, {**environ, "CHAINERMN_ALLOW_SINGLETONS": "1"})
    with pytest.raises(RuntimeError):
        check_launch(1, library, {**environ, "CHAINERMN_ALLOW_SINGLETONS": "0"})


RIGHT = [
    (MPICH, {}),
    (OPEN_MPI, {}),
    (MPICH, {"PMI_SIZE": "1", "PMI_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}),  # mpiexec -n 1 in another one's job
    (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0", "PMI_SIZE": "2"}),
    (MPICH, {"PMI_SIZE": "1", "PMI_RANK": "0", "SLURM_STEP_NUM_TASKS": "4"}),
    (MPICH, {"PMI_SIZE": "2"}),  # remaining variables of a job, if MPI was told to start separately
    (OPEN_MPI, {"PMI_SIZE": ""}),
    (OPEN_MPI, {"SLURM_NTASKS": "4"}),  # an allocation, without a launcher
]


@pytest.mark.parametrize(("library", "environ"), RIGHT)
def test_a_process_that_was_started_alone(library, environ):
    check_launch(1, library, environ)
