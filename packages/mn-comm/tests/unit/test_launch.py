import pytest

from mn_comm.launch import check_launch

STARTED = [{"PMI_SIZE": "2"}, {"OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "x"}, {"SLURM_STEP_NUM_TASKS": "16"}]


@pytest.mark.parametrize("environ", STARTED)
def test_a_process_that_is_alone_by_mistake(environ):
    name, started = next(iter(environ.items()))
    with pytest.raises(
        RuntimeError, match=rf"expected {started} processes .+ says in {name}, got 1: .+implementations"
    ):
        check_launch(1, environ)
    check_launch(2, environ)
    check_launch(1, {**environ, "CHAINERMN_ALLOW_SINGLETONS": "1"})
    with pytest.raises(RuntimeError):
        check_launch(1, {**environ, "CHAINERMN_ALLOW_SINGLETONS": "0"})


@pytest.mark.parametrize("environ", [{}, {"PMI_SIZE": "1"}, {"PMI_SIZE": ""}, {"SLURM_NTASKS": "4"}])
def test_a_process_that_was_started_alone(environ):
    check_launch(1, environ)
