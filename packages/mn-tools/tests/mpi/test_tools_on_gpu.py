"""The benchmark and the timeline with arrays on devices."""

import sys

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI
from on_gpu import SHARING

from mn_comm.ranks import spans
from mn_tools.bench.contestants import use_device
from mn_tools.timeline import record

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SHORT = ["--rounds", "1", "--sizes", "8,1M"]


@pytest.fixture(autouse=True)
def enough(devices):
    """NCCL needs a device for each rank."""
    if devices < SIZE and not SHARING:
        pytest.skip("ranks share a GPU and NCCL_MULTI_RANK_GPU_ENABLE is not set")


@pytest.mark.skipif(SIZE < 2, reason="there is nothing to measure on one rank")
def test_the_benchmark(run_bench):
    status, table, _ = run_bench(*SHORT, "--device")
    assert status == 0, table
    assert "gradients of float32 in GPU memory" in table
    for name in ("pure_nccl", "hierarchical", "non_cuda_aware"):
        assert sum(line.startswith(f"{name} ") for line in table.splitlines()) == 2


def test_one_rank_without_cupy(run_bench, monkeypatch):
    if RANK == SIZE - 1:
        monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="--device needs CuPy"):
        use_device(WORLD, 0)
    if SIZE > 1:
        status, table, errors = run_bench(*SHORT, "--device")
        assert (status, table) == (2, "")
        assert errors.count("--device needs CuPy") == 1


def test_the_timeline(monkeypatch, make):
    recorder = record.Recorder()
    monkeypatch.setattr(spans, "_recorder", recorder)
    comm = make("pure_nccl")
    arrays = [cupy.full(size, RANK, "f4") for size in (10, 20)]
    model = Model(**{f"p{i}": Param(array, array) for i, array in enumerate(arrays)})
    comm.multi_node_mean_grad(model)
    current = comm.gradient_reducer(background=True, bucket_bytes=40).start(model)
    current.ready_all()
    current.wait()
    names = [event[0] for event in recorder.events]
    assert names[:3] == ["agree", "communicate", "multi_node_mean_grad"]
    assert [name for name in names[3:] if name != "gradient_reducer"] == [
        *["pack", "launch"] * 2,
        "wait",
        "wait",
        "unpack",
        "unpack",
    ]
    for array in arrays:
        np.testing.assert_allclose(array.get(), (SIZE - 1) / 2)
