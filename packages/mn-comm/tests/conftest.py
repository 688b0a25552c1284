import sys
from pathlib import Path

import pytest
from hypothesis import settings

# For tests that share a stand-in.
sys.path.insert(0, str(Path(__file__).parent / "fakes"))

from shared_fixtures import comm, fake_cupy, name, world  # noqa: F401

# Under mpiexec, every rank must try the same examples in the same order, and none may stop to shrink one by itself.
settings.register_profile("ranks", derandomize=True, database=None, deadline=None, max_examples=25)
settings.load_profile("ranks")


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
    from mn_comm.gradients import layout, pace

    monkeypatch.setattr(pace, "SHARE_BYTES", (48, 160))
    monkeypatch.setattr(layout, "_BUCKET_BYTES", 200)
    monkeypatch.setattr(layout, "_BUCKET_BYTES_ACROSS", 200)
    monkeypatch.setattr(layout, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(layout, "_LARGE_BYTES", 24)


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    missing = _missing_for_gpu() if marked else None
    for item in marked:
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {missing}"))


def _missing_for_gpu():
    """Return why there is no device to run on, or ``None`` if there is one."""
    try:
        import cupy
    except ImportError as error:
        return str(error)
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
