"""Compressed averages with every strategy, on one node and across several, immediately and in the background."""

import dataclasses
import warnings

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI

from mn_comm import Future, create_communicator
from mn_compress import Compression, Int8, OneBit, PowerSGD, TopK
from mn_compress.exchange import Memory

pytestmark = pytest.mark.sizes(1)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
NAMES = ["flat", "hierarchical", "two_dimensional"]
ALL = [
    Int8(),
    Int8(block=32, rounding="stochastic", seed=3),
    OneBit(block=64),
    OneBit(block=64, start_iter=1),
    TopK(0.5, warm_up=2),
    PowerSGD(rank=2, start_iter=1),
]
SHAPES = [(40, 30), (), (7,), (90, 60), (0, 3), (3, 3, 3), (1,)]
BY_REPR = pytest.mark.parametrize("how", ALL, ids=repr)


def gradients(rank, step=0, dtype="f4", shapes=SHAPES):
    """Gradients that change little between steps; those of one rank are similar to matrices of rank two."""
    random = np.random.RandomState(rank)
    found = []
    for shape in shapes:
        rows, columns = (shape[0], int(np.prod(shape[1:]))) if len(shape) > 1 else (1, int(np.prod(shape)))
        matrix = np.sign(random.standard_normal((rows, 1))) @ random.uniform(0.5, 1.5, (1, columns))
        found.append((matrix + step * 1e-3).reshape(shape).astype(dtype))
    return found


def model_of(grads):
    return Model(**{f"p{i}": Param(np.zeros_like(grad), grad) for i, grad in enumerate(grads)})


def average(reducer, grads, background):
    model = model_of([grad.copy() for grad in grads])
    if background:
        reduction = reducer.start(model)
        reduction.ready_all()
        reduction.wait()
    else:
        reducer.average(model)
    return [param.grad for param in model.params.values()]


def flatten(arrays):
    return np.concatenate([np.asarray(array, "f8").reshape(-1) for array in arrays])


def same_on_all(arrays):
    mine = b"".join(array.tobytes() for array in arrays)
    return all(other == mine for other in WORLD.allgather(mine))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("nodes", [0, 2])
@pytest.mark.parametrize("name", NAMES)
@BY_REPR
def test_the_mean_of_many_steps_is_the_mean(how, name, nodes, background, on_nodes):
    comm = on_nodes(name, nodes, background=background) if nodes else create_communicator(name)
    reducer = comm.gradient_reducer(compression=how, background=background, bucket_bytes=8000 if background else None)
    expected = flatten([np.mean(each, axis=0) for each in zip(*map(gradients, range(SIZE)), strict=True)])
    total = 0
    for _ in range(30):
        means = average(reducer, gradients(RANK), background)
        assert [mean.dtype for mean in means] == [np.float32] * len(SHAPES)
        total = total + flatten(means)
    assert same_on_all(means)
    assert np.linalg.norm(total / 30 - expected) < 0.15 * np.linalg.norm(expected)
    exact = comm.gradient_reducer()
    np.testing.assert_allclose(flatten(average(exact, gradients(RANK), False)), expected, rtol=1e-5, atol=1e-6)
    comm.finalize()


@pytest.mark.parametrize("name", NAMES)
@BY_REPR
def test_gradients_cut_into_many_buckets(how, name, on_nodes, many_blocks):
    comm = on_nodes(name, 2)
    reducer = comm.gradient_reducer(compression=how)
    expected = flatten([np.mean(each, axis=0) for each in zip(*map(gradients, range(SIZE)), strict=True)])
    total = sum(flatten(average(reducer, gradients(RANK), False)) for _ in range(20))
    assert np.linalg.norm(total / 20 - expected) < 0.25 * np.linalg.norm(expected)
    comm.finalize()


def test_one_rank_alone_is_exact():
    comm = create_communicator("flat", MPI.COMM_SELF)
    for how in ALL:
        reducer = comm.gradient_reducer(compression=how)
        for _ in range(2):
            np.testing.assert_array_equal(flatten(average(reducer, gradients(RANK), False)), flatten(gradients(RANK)))
        assert reducer.compression_report == (0, 1.0, 0.0)
    comm.finalize()


@BY_REPR
def test_mixed_dtypes_and_missing_gradients(how, on_nodes):
    comm = on_nodes("two_dimensional", 2)
    reducer = comm.gradient_reducer(compression=how)
    dtypes = ["f2", "f4", "f8"]
    try:
        from ml_dtypes import bfloat16

        dtypes.append(bfloat16)
    except ImportError:
        pass
    for _ in range(3):
        grads = [grad for dtype in dtypes for grad in gradients(RANK, dtype=dtype)]
        model = model_of(grads)
        for i in range(0, len(grads), 3):
            model.params[f"p{i}"].grad = None if RANK % 2 else grads[i]
        reducer.average(model, zero_fill=True)
        means = [param.grad for param in model.params.values()]
        assert [mean.dtype for mean in means] == [grad.dtype for grad in grads]
        assert same_on_all(means)
        assert np.isfinite(flatten(means)).all()
    comm.finalize()


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
@pytest.mark.parametrize("background", [False, True])
@BY_REPR
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_is_forgotten(how, background, on_nodes):
    comm = on_nodes("two_dimensional", 2)
    reducer = comm.gradient_reducer(compression=how, background=background)
    for bad in (np.nan, np.inf):
        for _ in range(2):
            average(reducer, gradients(RANK), background)
        grads = gradients(RANK)
        if RANK == SIZE - 1:
            grads[3][50, 7] = bad
        means = average(reducer, grads, background)
        assert not np.isfinite(means[3][50, 7])
        assert same_on_all([np.isfinite(mean) for mean in means])
        for _ in range(2):
            assert np.isfinite(flatten(average(reducer, gradients(RANK), background))).all()
    comm.finalize()


@pytest.mark.parametrize("background", [False, True])
@BY_REPR
def test_a_reducer_goes_on_where_another_one_was(how, background, on_nodes):
    comm = on_nodes("two_dimensional", 2)
    one, other = (comm.gradient_reducer(compression=how, background=background) for _ in range(2))
    assert one.state() == {}
    for step in range(3):
        average(one, gradients(RANK, step), background)
    state = one.state()
    expected = [average(one, gradients(RANK, step), background) for step in range(3, 6)]
    other.load_state(state)
    again = other.state()
    assert again.keys() == state.keys()
    actual = [average(other, gradients(RANK, step), background) for step in range(3, 6)]
    one.load_state(state)  # into the same reducer, in the middle
    repeated = [average(one, gradients(RANK, step), background) for step in range(3, 6)]
    for means in zip(expected, actual, repeated, strict=True):
        for arrays in zip(*means, strict=True):
            assert len({array.tobytes() for array in arrays}) == 1
    comm.finalize()


@pytest.mark.skipif(SIZE < 2, reason="one rank remembers nothing")
@BY_REPR
def test_what_does_not_fit_on_one_rank_is_forgotten_on_all_with_one_warning(how):
    comm = create_communicator("flat")
    one, other = (comm.gradient_reducer(compression=how) for _ in range(2))
    for step in range(3):
        average(one, gradients(RANK, step), False)
    everyones = WORLD.allgather(one.state())
    other.load_state(everyones[0])  # as after a snapshot of rank 0 was loaded everywhere
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            assert same_on_all(average(other, gradients(RANK, step), False))
    assert [str(each.message)[:12] for each in caught] == (["compression:"] if RANK == 0 else [])
    fresh = comm.gradient_reducer(compression=how)
    for step in range(3):
        expected = average(fresh, gradients(RANK, step), False)
    other.load_state({})
    for step in range(3):
        actual = average(other, gradients(RANK, step), False)
    np.testing.assert_array_equal(flatten(actual), flatten(expected))
    comm.finalize()


@pytest.mark.parametrize("background", [False, True])
def test_loading_may_be_interrupted(background, monkeypatch):
    """A signal handler raises while it is waited for; it takes place all the same."""
    comm = create_communicator("flat")
    one, other = (comm.gradient_reducer(compression=Int8(), background=background) for _ in range(2))
    for each in (one, other):
        average(each, gradients(RANK), background)
    state = one.state()
    expected = flatten(average(one, gradients(RANK, 1), background))

    def interrupted(_):
        raise TimeoutError

    with monkeypatch.context() as changed, pytest.raises(TimeoutError):
        changed.setattr(Future, "wait", interrupted)
        other.load_state(state)
    np.testing.assert_array_equal(flatten(average(other, gradients(RANK, 1), background)), expected)
    comm.finalize()


@pytest.mark.skipif(SIZE < 2, reason="one rank remembers nothing")
def test_another_layout_begins_anew_with_one_warning():
    comm = create_communicator("flat")
    reducer = comm.gradient_reducer(compression=Int8())
    average(reducer, gradients(RANK), False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            average(reducer, gradients(RANK, shapes=SHAPES[:-1]), False)
            average(reducer, gradients(RANK), False)
    assert [str(each.message)[:12] for each in caught] == (["compression:"] if RANK == 0 else [])
    comm.finalize()


@pytest.mark.skipif(SIZE < 2, reason="one rank remembers nothing")
def test_where_warnings_are_errors_all_ranks_raise():
    comm = create_communicator("flat")
    reducer = comm.gradient_reducer(compression=Int8())
    average(reducer, gradients(RANK), False)
    with pytest.raises((UserWarning, RuntimeError), match="error feedback starts again"):
        average(reducer, gradients(RANK, shapes=SHAPES[:-1]), False)
    comm.finalize()


def test_models_that_take_turns_keep_what_is_theirs():
    comm = create_communicator("flat")
    reducer, alone = (comm.gradient_reducer(compression=TopK(0.3)) for _ in range(2))
    other = Model(q=Param(np.zeros(50, "f4")))
    for step in range(3):
        expected = average(alone, gradients(RANK, step), False)
        actual = average(reducer, gradients(RANK, step), False)
        np.testing.assert_array_equal(flatten(actual), flatten(expected))
        other.params["q"].grad = np.full(50, RANK, "f4")
        reducer.average(other)
    comm.finalize()


@BY_REPR
def test_an_abandoned_reduction_leaves_what_was_remembered(how):
    comm = create_communicator("flat")
    reducer, reference = (comm.gradient_reducer(compression=how, background=True) for _ in range(2))
    for step in range(2):
        average(reducer, gradients(RANK, step), True)
        average(reference, gradients(RANK, step), True)
    reduction = reducer.start(model_of([np.full(shape, 1e6, "f4") for shape in SHAPES]))
    if RANK == 0:
        reduction.abandon()
    else:
        reduction.ready_all()
    with pytest.raises(RuntimeError, match="rank 0 has abandoned its backward pass"):
        reduction.wait()
    for step in range(2, 4):
        actual, expected = (average(each, gradients(RANK, step), True) for each in (reducer, reference))
        np.testing.assert_array_equal(flatten(actual), flatten(expected))
    comm.finalize()


@pytest.mark.parametrize("how", ALL, ids=repr)
def test_an_exception_in_the_middle_leaves_what_was_remembered(how, monkeypatch):
    """Every rank raises after the first of several buckets."""
    comm = create_communicator("flat")
    large = [(900, 700), (1200, 700)]
    reducer, reference = (comm.gradient_reducer(compression=how, bucket_bytes=3_000_000) for _ in range(2))
    for each in (reducer, reference):
        average(each, gradients(RANK, shapes=large), False)
    from mn_comm.gradients.strategies import Strategy

    original, calls = Strategy.mean_across, iter(range(9))

    def failing(self, *args):
        if next(calls) == 1:
            raise MemoryError("in the middle")
        original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Strategy, "mean_across", failing)
        with pytest.raises(MemoryError):
            average(reducer, gradients(RANK, shapes=large), False)
    actual, expected = (average(each, gradients(RANK, shapes=large), False) for each in (reducer, reference))
    np.testing.assert_array_equal(flatten(actual), flatten(expected))
    comm.finalize()


@pytest.mark.skipif(SIZE < 3, reason="no memory is shared")
@pytest.mark.filterwarnings("ignore:gradients are averaged by messages")
@pytest.mark.parametrize("how", [Int8(), TopK(1.0)], ids=repr)
def test_memory_that_cannot_be_shared_by_later_buckets(how, on_nodes, monkeypatch):
    """Of two sets of buckets for the same gradients, one is averaged between nodes, the other between all ranks."""
    from mn_comm.gradients import strategy

    comm = on_nodes("hierarchical", 2, background=True)
    reducer = comm.gradient_reducer(compression=how, background=True, sets=2)
    share, calls = strategy.share, iter(range(9))

    def failing(*args):
        if next(calls):
            raise OSError("no more memory")
        return share(*args)

    monkeypatch.setattr(strategy, "share", failing)
    previous = None
    for step in range(5):
        model = model_of([np.full((30, 20), RANK + step, "f4")])
        reduction = reducer.start(model)
        reduction.ready_all()
        if previous is not None:
            previous[1].wait()
            (mean,) = [param.grad for param in previous[0].params.values()]
            np.testing.assert_allclose(mean, np.full_like(mean, (SIZE - 1) / 2 + step - 1), rtol=1e-3)
        previous = model, reduction
    reduction.wait()
    comm.finalize()


@pytest.mark.skipif(SIZE < 2, reason="one rank sends nothing")
def test_what_is_sent_is_counted(on_nodes):
    n = 1_000_000
    for name, nodes in (("flat", 0), ("two_dimensional", 2), ("hierarchical", 2)):
        comm = on_nodes(name, nodes) if nodes else create_communicator(name)
        crossing = nodes or SIZE
        for how, bits in ((Int8(), 8.125), (OneBit(), 1 + 32 / 1024), (TopK(0.01), 0.48 * crossing / 2)):
            reducer = comm.gradient_reducer(compression=how)
            grads = [np.random.RandomState(RANK).standard_normal(n).astype("f4")]
            for _ in range(2):
                average(reducer, grads, False)
            report = reducer.compression_report
            sent = WORLD.allreduce(report.bytes_sent)
            assert sent == pytest.approx(2 * (crossing - 1) * n * bits / 8, rel=0.25 if isinstance(how, TopK) else 0.01)
            if report.bytes_sent:
                assert report.ratio == pytest.approx(bits / 32, rel=0.25 if isinstance(how, TopK) else 0.01)
                assert report.error_norm > 0
        comm.finalize()


def test_errors_are_in_the_units_of_the_gradients():
    comm = create_communicator("flat")
    reducer, scaled = (comm.gradient_reducer(compression=OneBit(block=64)) for _ in range(2))
    for step, scale in enumerate([1.0, 1024.0, 1024.0, 8.0]):
        expected = average(reducer, gradients(RANK, step), False)
        scaled.scale_errors(scale)
        actual = average(scaled, [np.asarray(grad * np.float32(scale)) for grad in gradients(RANK, step)], False)
        np.testing.assert_array_equal(flatten(actual) / scale, flatten(expected))
    comm.finalize()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compression": "int8"}, TypeError, r"expected Int8\(\), TopK\(\), .* for compression, got str: 'int8'"),
        ({"compression": Int8}, TypeError, "for compression, got ABCMeta"),
        ({"compression": Int8(), "comm_hook": lambda bucket: bucket.average()}, ValueError, "got both"),
    ],
)
def test_bad_input(options, error, message):
    comm = create_communicator("flat")
    with pytest.raises(error, match=message):
        comm.gradient_reducer(**options)
    comm.finalize()


def test_naive_is_refused(comm):
    with pytest.raises(ValueError, match="two_dimensional, hierarchical or flat; got naive"):
        comm.gradient_reducer(compression=Int8())


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
def test_different_compressions_raise_on_all_ranks(comm):
    flat = create_communicator("flat")
    with pytest.raises(ValueError, match=r"expected the same compression .* Int8\(.*\) on rank 0 and TopK\(.*rank 1"):
        flat.gradient_reducer(compression=Int8() if RANK == 0 else TopK())
    with pytest.raises(ValueError, match="expected the same compression"):
        flat.gradient_reducer(compression=TopK(0.1 if RANK == 0 else 0.2))
    with pytest.raises((TypeError, ValueError), match=r"for compression, got int: 8|on rank 0"):
        flat.gradient_reducer(compression=8 if RANK == 0 else Int8())
    flat.finalize()


def test_what_compression_returns_is_for_all():
    comm = create_communicator("two_dimensional")
    assert not comm.gradient_reducer(compression=Int8()).can_leave_to_owners


@dataclasses.dataclass(frozen=True)
class Halves(Compression):
    """A third party's: sends float16, keeps no omitted part, and counts its steps."""

    counts: bool = True

    def exchange(self, portion):
        return HalvesExchange(self.counts)


class HalvesExchange:
    def __init__(self, counts):
        self.memory = Memory(unscaled={"steps": np.zeros(1, np.int64)} if counts else {})

    def average(self, transport, portion, step):
        ranks = transport.ranks
        others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        mine = portion.astype(np.float16)
        received = {rank: [np.empty_like(mine)] for rank in others}
        transport.swap({rank: [mine] for rank in others}, received, "Alltoall")
        received[ranks.rank] = [mine]
        portion[...] = np.mean([received[rank][0].astype(np.float32) for rank in range(ranks.size)], axis=0)
        for name, array in self.memory.now.items():
            self.memory.new[name][...] = array + 1


@pytest.mark.skipif(SIZE < 2, reason="nothing is exchanged")
@pytest.mark.parametrize("counts", [False, True])
def test_a_compression_that_keeps_no_omitted_part(comm, counts):
    """What it keeps is its own business: nothing is reported of it, and no loss scale changes it."""
    flat = create_communicator("flat")
    reducer = flat.gradient_reducer(compression=Halves(counts))
    for scale in (1.0, 1024.0, 3.0):
        reducer.scale_errors(scale)
        means = average(reducer, [np.full(7, RANK, "f4")], False)
        np.testing.assert_array_equal(means[0], np.full(7, (SIZE - 1) / 2, "f4"))
    assert reducer.compression_report.error_norm == 0
    assert reducer.compression_report.bytes_sent == (SIZE - 1) * 14
    again = flat.gradient_reducer(compression=Halves(counts))
    again.load_state(reducer.state())
    again.scale_errors(48.0)
    average(again, [np.full(7, RANK, "f4")], False)
    kept = [array.tolist() for name, array in again.state().items() if name != "header"]
    assert kept == ([[4]] if counts else [])
    flat.finalize()
