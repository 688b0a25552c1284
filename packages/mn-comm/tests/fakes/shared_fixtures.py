"""Fixtures of this package, and of others that are tested with them."""

import pytest


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


@pytest.fixture
def on_nodes(monkeypatch):
    """Return a function that creates a communicator whose ranks seem to run on several nodes, in turns or in blocks."""
    from mpi4py import MPI

    from mn_comm import create_communicator

    made = []

    def on_nodes(strategy, count, *, in_turns=True, background=False, **options):
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        node = rank % count if in_turns else rank * count // size
        monkeypatch.setattr(MPI, "Get_processor_name", lambda: f"node{node}")
        made.append(MPI.COMM_WORLD.Dup())  # each communicator determines once where its ranks run
        communicator = create_communicator(strategy, made[-1], **options)
        if background:  # the thread that averages has its own communicator, which also determines this
            assert communicator._contexts.background[0].topology.inter_size == communicator.inter_size
        monkeypatch.undo()
        return communicator

    yield on_nodes
    for mpi_comm in made:
        mpi_comm.Free()


@pytest.fixture
def many_blocks(monkeypatch):
    """Cut even short gradients into many blocks and buckets."""
    from mn_comm.gradients import blocks, share_size, strategy

    monkeypatch.setattr(share_size, "SHARE_BYTES", (48, 160))
    monkeypatch.setattr(strategy, "_BUCKET_BYTES", 200)
    monkeypatch.setattr(strategy, "_BUCKET_BYTES_ACROSS", 200)
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(blocks, "_LARGE_BYTES", 24)
