"""Compressed averages of arrays on devices, with stand-ins for CuPy and NCCL: bit for bit as in host memory."""

import gc

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI

from mn_comm import create_communicator
from mn_comm.compression import Int8, OneBit, PowerSGD, TopK

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
ALL = [Int8(), OneBit(block=64), TopK(0.3), PowerSGD(rank=2, start_iter=1)]
SHAPES = [(40, 30), (7,), (25, 60), (1,)]

several = pytest.mark.skipif(SIZE < 2, reason="nothing is exchanged")


@pytest.fixture(scope="module")
def cupy(fake_cupy):
    """CuPy's stand-in, with another device for each rank."""
    fake_cupy.cuda.Device(RANK % fake_cupy.DEVICES).use()
    yield fake_cupy
    gc.collect()  # what is pinned is given back to it, not to nobody


def gradients(step, dtype):
    random = np.random.RandomState(10 * step + RANK)
    return [random.uniform(-1, 1, shape).astype(dtype) for shape in SHAPES]


def average(reducer, arrays, background):
    model = Model(**{f"p{i}": Param(array, array) for i, array in enumerate(arrays)})
    if background:
        reduction = reducer.start(model)
        reduction.ready_all()
        reduction.wait()
    else:
        reducer.average(model)
    return [param.grad for param in model.params.values()]


@several
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("name", ["flat", "hierarchical", "two_dimensional", "non_cuda_aware", "pure_nccl"])
@pytest.mark.parametrize("how", ALL, ids=repr)
def test_on_one_node(cupy, how, name, dtype, background):
    """All ranks exchange, through host memory: what comes is what arrays in host memory would have come to."""
    comm, host = create_communicator(name), create_communicator("flat")
    options = {"compression": how, "background": background, "bucket_bytes": 1 << 20}
    on_device, on_host = (each.gradient_reducer(**options) for each in (comm, host))
    for step in range(4):
        expected = average(on_host, gradients(step, dtype), background)
        actual = average(on_device, [cupy.asarray(grad) for grad in gradients(step, dtype)], background)
        assert all(isinstance(array, cupy.ndarray) for array in actual)
        for one, other in zip(actual, expected, strict=True):
            assert one.get().tobytes() == other.tobytes()
    comm.finalize()
    host.finalize()


@pytest.mark.skipif(SIZE < 3, reason="needs a node of several ranks, and another one")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional", "non_cuda_aware"])
@pytest.mark.parametrize("how", ALL, ids=repr)
def test_across_nodes(cupy, on_nodes, how, name, background):
    """NCCL within nodes, or host memory; shares are compressed across them."""
    comm = on_nodes(name, 2)
    reducer = comm.gradient_reducer(compression=how, background=background)
    total = expected = 0
    for _ in range(20):
        means = average(reducer, [cupy.asarray(grad) for grad in gradients(0, "f4")], background)
        mine = np.concatenate([mean.get().reshape(-1) for mean in means])
        total = total + mine
    assert len(set(WORLD.allgather(mine.tobytes()))) == 1
    each = np.concatenate([grad.reshape(-1) for grad in gradients(0, "f4")])
    expected = np.mean(WORLD.allgather(each), axis=0)
    # Matrices of random numbers are far from those of rank two.
    tolerance = {PowerSGD: 0.7, OneBit: 0.3}.get(type(how), 0.15)
    assert np.linalg.norm(total / 20 - expected) < tolerance * np.linalg.norm(expected)
    comm.finalize()
