"""Compressed averages of arrays on real devices, or on one that two ranks share."""

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI
from on_gpu import average, random

from mn_compress import Int8, OneBit, PowerSGD, TopK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:gradients on devices are averaged through host memory"),
]

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SHAPES = {"a": (7, 3), "b": (1,), "c": (), "d": (0,), "e": (100_003,), "f": (64, 3, 7, 7)}


@pytest.mark.skipif(SIZE < 2, reason="nothing is exchanged")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("name", ["flat", "two_dimensional", "non_cuda_aware", "pure_nccl"])
@pytest.mark.parametrize(
    "how", [Int8(), OneBit(), TopK(0.1), TopK(0.1, momentum=0.5), PowerSGD(rank=2, start_iter=1)], ids=repr
)
def test_compression_as_on_the_host(make, how, name, dtype, background):
    """All ranks have the same bits; they also equal those of the host, except for the device's order of addition."""
    import cupy

    def mean(reducer, arrays):
        model = Model(**{key: Param(None, array) for key, array in arrays.items()})
        average(reducer, model, background)
        return {key: param.grad for key, param in model.params.items()}

    options = {"compression": how, "background": background, "bucket_bytes": 1 << 20}
    on_device, on_host = (make(each).gradient_reducer(**options) for each in (name, "flat"))
    for step in range(5):
        grads = {key: random(shape, dtype, RANK, step) for key, shape in SHAPES.items() if shape}
        expected = mean(on_host, {key: grad.copy() for key, grad in grads.items()})
        actual = mean(on_device, {key: cupy.asarray(grad) for key, grad in grads.items()})
        for key, array in actual.items():
            mine = array.get()
            assert all(other == mine.tobytes() for other in WORLD.allgather(mine.tobytes()))
            if isinstance(how, (Int8, TopK)):
                np.testing.assert_array_equal(mine, expected[key], strict=True)
            else:
                difference = np.linalg.norm(mine.astype("f8") - expected[key].astype("f8"))
                assert difference <= 0.02 * np.linalg.norm(expected[key].astype("f8"))
    assert on_device.compression_report.bytes_sent == pytest.approx(on_host.compression_report.bytes_sent, rel=0.05)


@pytest.mark.skipif(SIZE < 2, reason="nothing is exchanged")
@pytest.mark.parametrize("how", [Int8(), Int8(rounding="stochastic"), OneBit(), TopK(0.1)], ids=repr)
@pytest.mark.parametrize("name", ["flat", "pure_nccl"])
def test_what_is_not_finite_in_compression_and_snapshots(make, name, how):
    import cupy

    comm = make(name)
    first, second = (comm.gradient_reducer(compression=how) for _ in range(2))

    def step(reducer, number, bad=None):
        grad = random((100, 300), "f4", RANK, number)
        if bad is not None and RANK == 0:
            grad[5, 7] = bad
        model = Model(a=Param(None, cupy.asarray(grad)))
        reducer.average(model)
        return model.params["a"].grad.get()

    for number, bad in enumerate((np.nan, np.inf, -np.inf)):
        assert not np.isfinite(step(first, number, bad)[5, 7])
        assert np.isfinite(step(first, number)).all()
    second.load_state(first.state())
    for number in range(3):
        assert step(first, number).tobytes() == step(second, number).tobytes()
