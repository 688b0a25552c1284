import pytest
from hypothesis import settings

# Under mpiexec every rank must try the same examples, in the same order, and none may stop to shrink one alone.
settings.register_profile("ranks", derandomize=True, database=None, deadline=None, max_examples=25)
settings.load_profile("ranks")


@pytest.fixture(scope="session")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(params=["naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware"])
def name(request):
    return request.param


@pytest.fixture
def comm(world):
    from mn_comm import create_communicator

    communicator = create_communicator("naive")
    yield communicator
    communicator.finalize()
