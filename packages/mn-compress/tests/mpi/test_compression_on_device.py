"""Compressed averages of arrays on devices, with stand-ins for CuPy and NCCL: bit for bit as in host memory."""

import gc
import sys
import warnings

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI

from mn_comm import create_communicator
from mn_compress import Compression, Int8, OneBit, PowerSGD, TopK

pytestmark = pytest.mark.sizes(3, 4)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
ALL = [Int8(), OneBit(block=64), OneBit(start_iter=1), TopK(0.3), PowerSGD(rank=2, start_iter=1)]
SHAPES = [(40, 30), (7,), (25, 60), (1,)]

several = pytest.mark.skipif(SIZE < 2, reason="nothing is exchanged")


@pytest.fixture(scope="module")
def cupy(fake_cupy):
    """CuPy's stand-in, with another device for each rank."""
    fake_cupy.cuda.Device(RANK % fake_cupy.DEVICES).use()
    yield fake_cupy
    gc.collect()  # return pinned memory to it while it exists


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
    """All ranks exchange data: the result and the number of bytes are those of arrays in host memory."""
    comm, host = create_communicator(name), create_communicator("flat")
    options = {"compression": how, "background": background, "bucket_bytes": 1 << 20}
    on_device, on_host = (each.gradient_reducer(**options) for each in (comm, host))
    for step in range(4):
        expected = average(on_host, gradients(step, dtype), background)
        actual = average(on_device, [cupy.asarray(grad) for grad in gradients(step, dtype)], background)
        assert all(isinstance(array, cupy.ndarray) for array in actual)
        for one, other in zip(actual, expected, strict=True):
            assert one.get().tobytes() == other.tobytes()
        there, here = on_device.compression_report, on_host.compression_report
        assert there[:2] == here[:2]
        np.testing.assert_allclose(there.error_norm, here.error_norm, rtol=1e-5)
    comm.finalize()
    host.finalize()


@pytest.mark.skipif(SIZE < 3, reason="needs a node of several ranks, and another one")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional", "non_cuda_aware", "pure_nccl"])
@pytest.mark.parametrize("how", ALL, ids=repr)
def test_across_nodes(cupy, on_nodes, how, name, background):
    """NCCL within nodes, or host memory; shares are compressed across them."""
    comm = on_nodes(name, 2, background=background)
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


LARGE = (300, 400)
UNCOMPRESSED = 4 * 300 * 400


class Watched:
    """The calls of the stand-ins within a block, on this rank."""

    def __init__(self, cupy):
        self._lists = {"copies": cupy.log, "nccl": sys.modules["nccl"].core.log, "launches": cupy.launches}
        self._lists["syncs"] = cupy.syncs

    def __enter__(self):
        self._begin = {name: len(each) for name, each in self._lists.items()}
        return self

    def __exit__(self, *error):
        for name, each in self._lists.items():
            setattr(self, name, each[self._begin[name] :])


@pytest.fixture
def moved(cupy, monkeypatch):
    """Return a list with the bytes of each copy between host and device, on this rank."""
    found = []
    for name in ("get", "set"):
        original = getattr(cupy.ndarray, name)

        def copy(self, *args, original=original, **kwargs):
            found.append(self.nbytes)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(cupy.ndarray, name, copy)
    return found


def ready(comm, cupy, how, background=False, shape=LARGE, **options):
    """Return a reducer that has averaged once, and a model of one large gradient."""
    reducer = comm.gradient_reducer(compression=how, background=background, **options)
    grad = np.random.RandomState(RANK).standard_normal(shape).astype("f4")
    average(reducer, [cupy.asarray(grad)], background)
    return reducer, [cupy.asarray(grad)]


@several
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("how", [Int8(), Int8(rounding="stochastic"), OneBit()], ids=repr)
@pytest.mark.parametrize("name", ["two_dimensional", "pure_nccl"])
def test_by_nccl_nothing_is_copied_and_nobody_waits(cupy, moved, name, how, background):
    """Codes are sent from device to device; the program's thread puts everything on one stream."""
    comm = create_communicator(name)
    reducer, grads = ready(comm, cupy, how, background)
    moved.clear()
    with Watched(cupy) as watched:
        average(reducer, grads, background)
    assert not [each for each in moved if each > 1000]  # except for the table of addresses
    assert not watched.syncs
    assert {name for name, *_ in watched.nccl} == {"send", "recv"}
    assert {thread for _, thread, _ in watched.nccl} == {"MainThread"}
    streams = {stream for *_, stream, _ in watched.launches}
    assert len(streams) == 1
    assert {stream.ptr for stream in streams} == {stream for *_, stream in watched.nccl}
    assert (streams == {cupy.get_current_stream()}) != background
    assert {thread for _, thread, *_ in watched.launches} == {"MainThread"}
    assert all(is_on_current for *_, is_on_current in watched.launches)
    # For a bucket of any size: launches to quantise it twice, and a few for each other rank.
    assert len(watched.launches) < 110 + 12 * SIZE
    comm.finalize()


@several
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("how", [Int8(), OneBit(), TopK(0.01), PowerSGD(rank=2, start_iter=0)], ids=repr)
def test_staged_only_codes_leave_the_device(cupy, moved, how, background):
    comm = create_communicator("flat")
    reducer, grads = ready(comm, cupy, how, background)
    moved.clear()
    with Watched(cupy) as watched:
        average(reducer, grads, background)
    sent = reducer.compression_report.bytes_sent
    assert sent < 0.55 * UNCOMPRESSED * (SIZE - 1)
    # The same number of bytes is received; there are also some small tables.
    assert sent < sum(moved) < 2.2 * sent + 10_000
    assert not watched.nccl
    thread = {thread for _, thread, *_ in watched.launches}
    assert (thread == {"MainThread"}) != background
    assert len(thread) == 1
    assert len({stream for *_, stream, _ in watched.launches}) == 1
    assert all(is_on_current for *_, is_on_current in watched.launches)
    comm.finalize()


@pytest.mark.skipif(SIZE < 4, reason="needs two nodes of two ranks")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", ["two_dimensional", "hierarchical", "pure_nccl"])
def test_only_what_crosses_nodes_is_compressed(cupy, on_nodes, name, background):
    """Within nodes all ranks' gradients are averaged by NCCL, exactly; each share is compressed once."""
    comm = on_nodes(name, 2, background=background)
    reducer, grads = ready(comm, cupy, Int8(), background)
    with Watched(cupy) as watched:
        average(reducer, grads, background)
    within = "reduce" if name == "hierarchical" else "reduce_scatter"
    after = "broadcast" if name == "hierarchical" else "allgather"
    names = [name for name, *_ in watched.nccl]
    assert [each for each in names if each not in ("send", "recv")] == [within, after]
    assert ("send" in names) == (name == "pure_nccl")
    if name == "pure_nccl":
        assert not watched.syncs
        assert names.index(within) < names.index("send") < names.index(after)
    talks = comm.intra_rank == 0 or name != "hierarchical"
    share = UNCOMPRESSED if name == "hierarchical" else UNCOMPRESSED // 2
    assert reducer.compression_report.bytes_sent == (pytest.approx(share * (1 + 4 / 256) / 4, rel=0.01) if talks else 0)
    exact = comm.gradient_reducer(background=background)
    (expected,) = average(exact, [grads[0].copy()], background)
    (actual,) = average(comm.gradient_reducer(compression=Int8(), background=background), [grads[0].copy()], background)
    assert abs(actual.get() - expected.get()).max() < 2 * abs(expected.get()).max() / 127
    comm.finalize()


@several
@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f8"])
@pytest.mark.parametrize("how", [*ALL, Int8(rounding="stochastic")], ids=repr)
def test_other_dtypes(cupy, how, dtype):
    """Half precision is packed as float32 and converted back; the mean over many steps is the mean."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    comm = create_communicator("pure_nccl")
    reducer = comm.gradient_reducer(compression=how)
    given = [grad.astype(dtype) for grad in gradients(0, "f4")]
    total = 0
    for _ in range(40):
        found = [each.get() for each in average(reducer, [cupy.asarray(grad) for grad in given], False)]
        assert {each.dtype for each in found} == {dtype}
        mine = b"".join(each.tobytes() for each in found)
        assert len(set(WORLD.allgather(mine))) == 1
        total = total + np.concatenate([each.astype("f8").reshape(-1) for each in found])
    expected = np.mean(WORLD.allgather(np.concatenate([each.astype("f8").reshape(-1) for each in given])), axis=0)
    tolerance = 0.75 if isinstance(how, PowerSGD) else 0.12  # matrices of random numbers are far from those of rank two
    assert np.linalg.norm(total / 40 - expected) < tolerance * np.linalg.norm(expected)
    plain = 2 * (SIZE - 1) / SIZE * sum(each.nbytes for each in given)
    report = reducer.compression_report
    assert report.ratio == pytest.approx(report.bytes_sent / plain)
    comm.finalize()


@several
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", ALL, ids=repr)
@pytest.mark.parametrize("name", ["flat", "pure_nccl"])
def test_what_is_not_finite_reaches_all_and_is_not_remembered(cupy, name, how, bad):
    comm = create_communicator(name)
    reducer = comm.gradient_reducer(compression=how)
    for step in range(4):
        given = gradients(step, "f4")
        if step == 2 and RANK == SIZE - 1:
            given[0][3, 4] = bad
        found = [each.get() for each in average(reducer, [cupy.asarray(grad) for grad in given], False)]
        if step == 2:
            assert not np.isfinite(found[0][3, 4])
        else:
            assert all(np.isfinite(each).all() for each in found)
    assert np.isfinite(reducer.compression_report.error_norm)
    comm.finalize()


@several
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("how", [*ALL, Int8(rounding="stochastic"), TopK(0.2, momentum=0.5)], ids=repr)
@pytest.mark.parametrize("name", ["flat", "two_dimensional"])
def test_a_snapshot_goes_on_with_the_same_bits(cupy, name, how, background):
    """Errors are kept on the device, saved as arrays in host memory, and loaded from these."""
    comm = create_communicator(name)
    first, second = (comm.gradient_reducer(compression=how, background=background) for _ in range(2))

    def step(reducer, number):
        found = average(reducer, [cupy.asarray(grad) for grad in gradients(number, "f4")], background)
        return b"".join(each.get().tobytes() for each in found)

    for number in range(3):
        step(first, number)
    memories = [each.memory for known in first._compressor._known.values() for each in known.exchanges.values()]
    assert memories
    assert all(isinstance(array, cupy.ndarray) for memory in memories for array in memory.now.values())
    state = first.state()
    assert all(type(array) is np.ndarray for array in state.values())
    second.load_state(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3, 6):
            assert step(first, number) == step(second, number)
    comm.finalize()


@several
@pytest.mark.parametrize("how", ALL, ids=repr)
def test_what_was_left_out_is_scaled_with_the_loss(cupy, how):
    comm = create_communicator("pure_nccl")
    reducer, _ = ready(comm, cupy, how)
    before = reducer.compression_report.error_norm
    reducer.scale_errors(8)
    assert reducer.compression_report.error_norm == pytest.approx(before)
    (memory,) = [each.memory for known in reducer._compressor._known.values() for each in known.exchanges.values()]
    assert np.linalg.norm(memory.now["error"].get()) == pytest.approx(8 * before)
    comm.finalize()


@several
def test_ranks_that_share_a_device_are_told_or_do_without_nccl(cupy):
    with cupy.cuda.Device(0):
        for how in (Int8(), OneBit()):
            comm = create_communicator("pure_nccl")
            with pytest.raises(ValueError, match="expected a GPU for each rank, got ranks 0 and 1"):
                ready(comm, cupy, how)
            comm.finalize()
            comm = create_communicator("two_dimensional")
            with warnings.catch_warnings(), Watched(cupy) as watched:
                warnings.simplefilter("error")
                ready(comm, cupy, how)
            assert not watched.nccl
            comm.finalize()


@several
@pytest.mark.parametrize("how", [*ALL, Int8(block=16)], ids=repr)
@pytest.mark.parametrize("name", ["flat", "pure_nccl"])
def test_one_reduction_under_way_while_the_next_begins(cupy, name, how):
    """As in double buffering: the second begins with the errors that the first has left."""
    comm, host = create_communicator(name), create_communicator("flat")
    options = {"compression": how, "background": True, "bucket_bytes": 4000, "sets": 2}
    found = []
    for each, place in ((comm, cupy.asarray), (host, np.array)):
        reducer, waiting, means = each.gradient_reducer(**options), [], []
        for step in range(6):
            arrays = [place(grad) for grad in gradients(step, "f4")]
            model = Model(**{f"p{i}": Param(array, array) for i, array in enumerate(arrays)})
            reduction = reducer.start(model)
            reduction.ready_all()
            waiting.append((reduction, model))
            if step:
                first, averaged = waiting.pop(0)
                first.wait()
                grads = [param.grad for param in averaged.params.values()]
                means.append(b"".join((grad if place is np.array else grad.get()).tobytes() for grad in grads))
        waiting.pop()[0].wait()
        found.append((means, reducer.compression_report.bytes_sent))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=0.001)  # only the host omits the places where all travel
    comm.finalize()
    host.finalize()


@several
@pytest.mark.parametrize("how", ALL, ids=repr)
@pytest.mark.parametrize("name", ["flat", "two_dimensional"])
def test_some_gradients_on_the_device_and_some_in_host_memory(cupy, name, how):
    comm = create_communicator(name)
    reducer = comm.gradient_reducer(compression=how, background=True)
    for step in range(3):
        arrays = [cupy.asarray(grad) if i % 2 else grad for i, grad in enumerate(gradients(step, "f4"))]
        found = [array if isinstance(array, np.ndarray) else array.get() for array in average(reducer, arrays, True)]
        assert len(set(WORLD.allgather(b"".join(array.tobytes() for array in found)))) == 1
    counted = reducer._compressor._last[1]
    assert counted == pytest.approx(2 * (SIZE - 1) / SIZE * sum(array.nbytes for array in found))
    comm.finalize()


class Doubled(Compression):
    """A third party's compression, which supports only NumPy."""

    def __repr__(self):
        return "Doubled()"

    def exchange(self, portion):
        inner = Int8().exchange(portion._replace(xp=np))
        assert portion.xp is np
        return inner


@several
@pytest.mark.parametrize("name", ["flat", "pure_nccl", "two_dimensional"])
def test_a_compression_that_knows_no_devices_is_given_arrays_in_host_memory(cupy, name):
    comm = create_communicator(name)
    reducer = comm.gradient_reducer(compression=Doubled())
    (mean,) = average(reducer, [cupy.asarray(np.full((20, 30), RANK, "f4"))], False)
    np.testing.assert_allclose(mean.get(), (SIZE - 1) / 2, rtol=0.01)
    comm.finalize()
