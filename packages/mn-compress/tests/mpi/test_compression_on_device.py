"""Compressed averages of arrays on devices: as in host memory, with few copies and no unnecessary wait."""

import warnings

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI
from on_gpu import SHARING, average

from mn_comm import create_communicator
from mn_compress import Compression, Int8, OneBit, PowerSGD, TopK

cupy = pytest.importorskip("cupy")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sizes(4),
    pytest.mark.filterwarnings("ignore:gradients on devices are averaged through host memory"),
]

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
ALL = [Int8(), OneBit(block=64), OneBit(start_iter=1), TopK(0.3), PowerSGD(rank=2, start_iter=1)]
SHAPES = [(40, 30), (7,), (25, 60), (1,), (0,)]

several = pytest.mark.skipif(SIZE < 2, reason="nothing is exchanged")


@pytest.fixture(autouse=True)
def enough(devices):
    """NCCL needs a device for each rank."""
    if devices < SIZE and not SHARING:
        pytest.skip("ranks share a GPU and NCCL_MULTI_RANK_GPU_ENABLE is not set")


def gradients(step, dtype):
    random = np.random.RandomState(10 * step + RANK)
    return [random.uniform(-1, 1, shape).astype(dtype) for shape in SHAPES]


def means_of(reducer, arrays, background):
    model = Model(**{f"p{i}": Param(array, array) for i, array in enumerate(arrays)})
    average(reducer, model, background)
    return [param.grad for param in model.params.values()]


@several
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("name", ["flat", "hierarchical", "two_dimensional", "non_cuda_aware", "pure_nccl"])
@pytest.mark.parametrize("how", [*ALL, TopK(0.3, momentum=0.5)], ids=repr)
def test_on_one_node(make, how, name, dtype, background):
    """All ranks exchange data: the result and the number of bytes are those of arrays in host memory."""
    options = {"compression": how, "background": background, "bucket_bytes": 1 << 20}
    on_device, on_host = (make(each).gradient_reducer(**options) for each in (name, "flat"))
    for step in range(4):
        expected = means_of(on_host, gradients(step, dtype), background)
        actual = means_of(on_device, [cupy.asarray(grad) for grad in gradients(step, dtype)], background)
        assert all(isinstance(array, cupy.ndarray) for array in actual)
        check_equal(actual, expected, how)
        there, here = on_device.compression_report, on_host.compression_report
        assert there[:2] == here[:2]
        np.testing.assert_allclose(there.error_norm, here.error_norm, rtol=1e-5 if is_exact(how) else 0.02)


def is_exact(how):
    """Return whether nothing depends on the order in which a device adds up."""
    return isinstance(how, (Int8, TopK))


def check_equal(actual, expected, how):
    """Check that all ranks have the same bits, and that they are the host's, where these do not depend on an order."""
    for one, other in zip(actual, expected, strict=True):
        mine = one.get()
        assert len(set(WORLD.allgather(mine.tobytes()))) == 1
        if is_exact(how):
            assert mine.tobytes() == other.tobytes()
        else:
            difference = np.linalg.norm(mine.astype("f8") - other.astype("f8"))
            assert difference <= 0.02 * np.linalg.norm(other.astype("f8"))


@several
@pytest.mark.parametrize("how", [*ALL, TopK(0.1, momentum=0.5)], ids=repr)
@pytest.mark.parametrize("name", ["flat", "pure_nccl"])
def test_a_large_gradient(make, how, name):
    on_device, on_host = (make(each).gradient_reducer(compression=how) for each in (name, "flat"))
    for step in range(3):
        grad = np.random.RandomState(10 * step + RANK).uniform(-1, 1, 100_003).astype("f4")
        expected = means_of(on_host, [grad.copy()], False)
        check_equal(means_of(on_device, [cupy.asarray(grad)], False), expected, how)
    assert on_device.compression_report.bytes_sent == pytest.approx(on_host.compression_report.bytes_sent, rel=0.05)


@pytest.mark.skipif(SIZE < 3, reason="needs a node of several ranks, and another one")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional", "non_cuda_aware", "pure_nccl"])
@pytest.mark.parametrize("how", ALL, ids=repr)
def test_across_nodes(on_nodes, how, name, background):
    """NCCL within nodes, or host memory; shares are compressed across them."""
    comm = on_nodes(name, 2, background=background)
    reducer = comm.gradient_reducer(compression=how, background=background)
    total = expected = 0
    for _ in range(20):
        means = means_of(reducer, [cupy.asarray(grad) for grad in gradients(0, "f4")], background)
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


def moved(traced):
    """Return the sizes of the copies between host and device."""
    return [each.nbytes for each in traced.operations if each.kind == "copy" and each.name != "on device"]


def of_kind(traced, kind):
    return [each for each in traced.operations if each.kind == kind]


def ready(comm, how, background=False, shape=LARGE, **options):
    """Return a reducer that has averaged once, and a model of one large gradient."""
    reducer = comm.gradient_reducer(compression=how, background=background, **options)
    grad = np.random.RandomState(RANK).standard_normal(shape).astype("f4")
    grads = [cupy.asarray(grad)]  # at the same address in each step, so their table is not sent again
    means_of(reducer, grads, background)
    return reducer, grads


@several
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("how", [Int8(), Int8(rounding="stochastic"), OneBit()], ids=repr)
@pytest.mark.parametrize("name", ["two_dimensional", "pure_nccl"])
def test_by_nccl_nothing_is_copied_and_nobody_waits(make, trace, name, how, background):
    """Codes are sent from device to device; the program's thread puts everything on one stream."""
    reducer, grads = ready(make(name), how, background)
    with trace as traced:
        means_of(reducer, grads, background)
    assert not moved(traced)
    assert not of_kind(traced, "wait")
    sent, launches = of_kind(traced, "nccl"), of_kind(traced, "kernel")
    assert {each.name for each in sent} == {"send", "recv"}
    assert {each.thread for each in (*sent, *launches)} == {"MainThread"}
    current = cupy.cuda.get_current_stream().ptr
    (stream,) = {each.stream for each in launches if each.name not in ("pack", "unpack")}
    assert {each.stream for each in sent} == {stream}
    assert (stream == current) != background
    assert {each.device for each in launches} == {cupy.cuda.Device().id}
    # For a bucket of any size: to pack it, add the error, quantise it, decode and add up the summands of other ranks,
    # multiply, add the error, quantise the mean, decode all means, and unpack them.
    assert len(launches) == 8 + 2 * (SIZE - 1)


@several
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("how", [Int8(), OneBit(), TopK(0.01), PowerSGD(rank=2, start_iter=0)], ids=repr)
def test_staged_only_codes_leave_the_device(make, trace, how, background):
    reducer, grads = ready(make("flat"), how, background)
    with trace as traced:
        means_of(reducer, grads, background)
    sent = reducer.compression_report.bytes_sent
    assert sent < 0.55 * UNCOMPRESSED * (SIZE - 1)
    # The same number of bytes is received; there are also some small tables.
    assert sent < sum(moved(traced)) < 2.2 * sent + 10_000
    assert not of_kind(traced, "nccl")
    launches = [each for each in of_kind(traced, "kernel") if each.name not in ("pack", "unpack")]
    (thread,) = {each.thread for each in launches}
    assert (thread == "MainThread") != background
    assert len({each.stream for each in launches}) == 1
    assert {each.device for each in launches} == {cupy.cuda.Device().id}


@pytest.mark.skipif(SIZE < 4, reason="needs two nodes of two ranks")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", ["two_dimensional", "hierarchical", "pure_nccl"])
def test_only_what_crosses_nodes_is_compressed(on_nodes, trace, name, background):
    """Within nodes all ranks' gradients are averaged by NCCL, exactly; each share is compressed once."""
    comm = on_nodes(name, 2, background=background)
    reducer, grads = ready(comm, Int8(), background)
    with trace as traced:
        means_of(reducer, grads, background)
    within = "reduce" if name == "hierarchical" else "reduce_scatter"
    after = "broadcast" if name == "hierarchical" else "allgather"
    names = traced.names("nccl")
    assert [each for each in names if each not in ("send", "recv")] == [within, after]
    assert ("send" in names) == (name == "pure_nccl")
    if name == "pure_nccl":
        assert not of_kind(traced, "wait")
        assert names.index(within) < names.index("send") < names.index(after)
    talks = comm.intra_rank == 0 or name != "hierarchical"
    share = UNCOMPRESSED if name == "hierarchical" else UNCOMPRESSED // 2
    assert reducer.compression_report.bytes_sent == (pytest.approx(share * (1 + 4 / 256) / 4, rel=0.01) if talks else 0)
    exact = comm.gradient_reducer(background=background)
    (expected,) = means_of(exact, [grads[0].copy()], background)
    (actual,) = means_of(
        comm.gradient_reducer(compression=Int8(), background=background), [grads[0].copy()], background
    )
    assert abs(actual.get() - expected.get()).max() < 2 * abs(expected.get()).max() / 127
    comm.finalize()


@pytest.mark.skipif(SIZE < 4, reason="needs two nodes of two ranks")
def test_models_on_two_devices_of_each_rank_are_sent_across_nodes_by_their_own_communicators(on_nodes, devices):
    if devices < SIZE:
        pytest.skip("needs a device for each rank")
    reducer = on_nodes("pure_nccl", 2).gradient_reducer(compression=Int8())
    placed = {"a": RANK, "b": (RANK + 1) % SIZE}
    models = {}
    for name, device in placed.items():
        with cupy.cuda.Device(device):
            models[name] = Model(**{name: Param(None, cupy.full(1000, float(RANK), "f4"))})
    for _ in range(2):  # each layout is made in the first step, and used after the other one in the second
        for name, device in placed.items():
            with cupy.cuda.Device(device):
                reducer.average(models[name])
    for name, device in placed.items():
        with cupy.cuda.Device(device):
            np.testing.assert_allclose(models[name].params[name].grad.get(), (SIZE - 1) / 2, rtol=0.01)


@several
@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f8"])
@pytest.mark.parametrize("how", [*ALL, Int8(rounding="stochastic")], ids=repr)
def test_other_dtypes(how, dtype):
    """Half precision is packed as float32 and converted back; the mean over many steps is the mean."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    comm = create_communicator("pure_nccl")
    reducer = comm.gradient_reducer(compression=how)
    given = [grad.astype(dtype) for grad in gradients(0, "f4")]
    total = 0
    for _ in range(40):
        found = [each.get() for each in means_of(reducer, [cupy.asarray(grad) for grad in given], False)]
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
def test_what_is_not_finite_reaches_all_and_is_not_remembered(name, how, bad):
    comm = create_communicator(name)
    reducer = comm.gradient_reducer(compression=how)
    for step in range(4):
        given = gradients(step, "f4")
        if step == 2 and RANK == SIZE - 1:
            given[0][3, 4] = bad
        found = [each.get() for each in means_of(reducer, [cupy.asarray(grad) for grad in given], False)]
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
def test_a_snapshot_goes_on_with_the_same_bits(name, how, background):
    """Errors are kept on the device, saved as arrays in host memory, and loaded from these."""
    comm = create_communicator(name)
    first, second = (comm.gradient_reducer(compression=how, background=background) for _ in range(2))

    def step(reducer, number):
        found = means_of(reducer, [cupy.asarray(grad) for grad in gradients(number, "f4")], background)
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
def test_what_was_left_out_is_scaled_with_the_loss(how):
    comm = create_communicator("pure_nccl")
    reducer, _ = ready(comm, how)
    before = reducer.compression_report.error_norm
    reducer.scale_errors(8)
    assert reducer.compression_report.error_norm == pytest.approx(before)
    (memory,) = [each.memory for known in reducer._compressor._known.values() for each in known.exchanges.values()]
    assert np.linalg.norm(memory.now["error"].get()) == pytest.approx(8 * before)
    comm.finalize()


@several
def test_ranks_that_share_a_device_are_told_or_do_without_nccl(trace, monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with cupy.cuda.Device(0):
        for how in (Int8(), OneBit()):
            comm = create_communicator("pure_nccl")
            with pytest.raises(ValueError, match="expected a GPU for each rank, got ranks 0 and 1"):
                ready(comm, how)
            comm.finalize()
            comm = create_communicator("two_dimensional")
            with warnings.catch_warnings(), trace as traced:
                warnings.simplefilter("error")
                ready(comm, how)
            assert not of_kind(traced, "nccl")
            comm.finalize()


@several
@pytest.mark.parametrize("how", [*ALL, Int8(block=16)], ids=repr)
@pytest.mark.parametrize("name", ["flat", "pure_nccl"])
def test_one_reduction_under_way_while_the_next_begins(name, how):
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
                means.append([param.grad for param in averaged.params.values()])
        waiting.pop()[0].wait()
        found.append((means, reducer.compression_report.bytes_sent))
    for actual, expected in zip(found[0][0], found[1][0], strict=True):
        check_equal(actual, expected, how)
    assert found[0][1] == pytest.approx(found[1][1], rel=0.001)  # only the host omits the places where all travel
    comm.finalize()
    host.finalize()


@several
@pytest.mark.parametrize("how", ALL, ids=repr)
@pytest.mark.parametrize("name", ["flat", "two_dimensional"])
def test_some_gradients_on_the_device_and_some_in_host_memory(name, how):
    comm = create_communicator(name)
    reducer = comm.gradient_reducer(compression=how, background=True)
    for step in range(3):
        arrays = [cupy.asarray(grad) if i % 2 else grad for i, grad in enumerate(gradients(step, "f4"))]
        found = [array if isinstance(array, np.ndarray) else array.get() for array in means_of(reducer, arrays, True)]
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
def test_a_compression_that_knows_no_devices_is_given_arrays_in_host_memory(name):
    comm = create_communicator(name)
    reducer = comm.gradient_reducer(compression=Doubled())
    (mean,) = means_of(reducer, [cupy.asarray(np.full((20, 30), RANK, "f4"))], False)
    np.testing.assert_allclose(mean.get(), (SIZE - 1) / 2, rtol=0.01)
    comm.finalize()
