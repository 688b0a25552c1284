"""Local SGD, DiLoCo and Streaming DiLoCo whose meetings are compressed, with error feedback."""

import io
import warnings
from dataclasses import replace

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_compress import Int8, OneBit, PowerSGD, TopK
from mn_optim import DiLoCo, LocalSGD, MultiNodeOptimizer, StreamingDiLoCo, SynchronousFirst

COMM = create_communicator("flat")
RANK, SIZE = COMM.rank, COMM.size
SHAPES = {"a": (30, 14), "b": (5,), "c": (20, 20), "d": (40,)}
KINDS = [Int8(rounding="stochastic"), OneBit(block=64), TopK(0.2), PowerSGD(2, 1, 1.2)]
LOCAL_STEPS = [
    LocalSGD(2),
    SynchronousFirst(2, LocalSGD(3, average_state=True)),
    DiLoCo(2),
    StreamingDiLoCo(3, fragments=2, delay=0, alpha=0.5),
    StreamingDiLoCo(3, fragments=3, delay=2, alpha=0.5),
    StreamingDiLoCo(3, fragments=2, delay=1, alpha=1),
]
BY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
BY_STEPS = pytest.mark.parametrize("local_steps", LOCAL_STEPS)
several = pytest.mark.skipif(SIZE < 2, reason="one rank compresses nothing")


class Net(chainer.Link):
    """Parameters whose gradients are given."""

    def __init__(self, seed=0, dtype="f4"):
        super().__init__()
        random = np.random.RandomState(seed)
        with self.init_scope():
            for name, shape in SHAPES.items():
                setattr(self, name, chainer.Parameter(random.randn(*shape).astype(dtype)))


def sending(when, kind):
    """Return local steps whose meetings are compressed."""
    if isinstance(when, SynchronousFirst):
        return replace(when, then=replace(when.then, send=kind))
    return replace(when, send=kind)


def local_steps_of(optimizer):
    scheme = optimizer._stepper.scheme
    return getattr(scheme, "_then", scheme)


def make(local_steps, kind, actual=None, comm=COMM, model=None):
    actual = chainer.optimizers.SGD(lr=0.5) if actual is None else actual
    optimizer = MultiNodeOptimizer(actual, comm, sending(local_steps, kind))
    optimizer.setup(Net() if model is None else model)
    optimizer.assume_synchronized()
    return optimizer


def gradients(step):
    random = np.random.RandomState(1000 * step + RANK)
    return {name: random.randn(*shape) for name, shape in SHAPES.items()}


def advance(optimizer, given):
    for name, param in optimizer.target.namedparams():
        param.grad = np.asarray(given[name.strip("/")], param.dtype)
    optimizer.update()


def bits(named):
    return b"".join(param.data.tobytes() for _, param in sorted(named))


def equal_everywhere(named):
    assert len(set(COMM.allgather_obj(bits(named)))) == 1


def flat(model):
    return np.concatenate([param.data.ravel() for _, param in sorted(model.namedparams())])


@pytest.mark.parametrize("local_steps", LOCAL_STEPS[::2])
@BY_KIND
def test_all_ranks_hold_the_same_bits_after_every_meeting(kind, local_steps):
    optimizer, meetings = make(local_steps, kind), 0
    for step in range(14):
        advance(optimizer, gradients(step))
        for fragment in local_steps_of(optimizer)._fragments:
            equal_everywhere(fragment.common)
        if optimizer.is_meeting and not isinstance(local_steps, StreamingDiLoCo):
            equal_everywhere(optimizer.target.namedparams())
            meetings += 1
    assert meetings or isinstance(local_steps, StreamingDiLoCo)
    optimizer.synchronize()
    equal_everywhere(optimizer.target.namedparams())


@several
@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("kind", [Int8(), OneBit(block=8), TopK(0.2), PowerSGD(2, 1, 1.2)], ids=repr)
def test_what_a_meeting_leaves_out_comes_later(kind, alpha):
    """With steps of equal size, the distance from exact meetings does not grow with the number of meetings."""
    outer = chainer.optimizers.SGD(lr=0.7)
    local_steps = LocalSGD(2) if alpha is None else StreamingDiLoCo(3, outer, fragments=2, delay=1, alpha=alpha)
    exact, compressed = (make(local_steps, how) for how in (None, kind))
    behind = []
    for _ in range(4):
        for optimizer in (exact, compressed):
            for _ in range(12):
                advance(optimizer, gradients(0))
            optimizer.synchronize()
        behind.append(np.linalg.norm(flat(compressed.target) - flat(exact.target)))
    gone = np.linalg.norm(flat(exact.target) - flat(Net()))
    assert 0 < behind[3] < 0.3 * gone
    assert behind[3] < 2 * behind[0] + 0.01 * gone, (behind, gone)  # and not four times as much


@several
@pytest.mark.parametrize("delay", [0, 1])
def test_what_stays_with_a_rank_does_no_harm(delay):
    """With alpha below 1, part of what was not sent is still in the rank's own parameters at the next meeting."""
    outer = chainer.optimizers.SGD(lr=1)
    optimizer = make(StreamingDiLoCo(2, outer, fragments=1, delay=delay, alpha=0.5), TopK(0.1))
    once = gradients(0)
    advance(optimizer, once)
    for _ in range(200):
        advance(optimizer, {name: np.zeros(shape) for name, shape in SHAPES.items()})
    expected = flat(Net()) - 0.5 * np.mean(
        COMM.allgather_obj(np.concatenate([once[name].ravel() for name in sorted(SHAPES)])), axis=0
    )
    np.testing.assert_allclose(flat(optimizer.target), expected, atol=1e-3)
    optimizer.synchronize()
    np.testing.assert_allclose(flat(optimizer.target), expected, atol=1e-3)


@several
def test_a_rank_that_went_nowhere_does_not_count():
    """Its errors do not count more often either."""
    ends = {}
    for how in (None, Int8()):
        optimizer = make(LocalSGD(2), how)
        for step in range(2):
            advance(optimizer, gradients(step))
        if RANK == 0:
            for step in range(2, 4):
                advance(optimizer, gradients(step))
        optimizer.synchronize()
        equal_everywhere(optimizer.target.namedparams())
        ends[how] = flat(optimizer.target)
    assert np.abs(ends[None] - ends[Int8()]).max() < 0.05
    assert np.abs(ends[None] - flat(Net())).max() > 0.5


def saved(target):
    file = io.BytesIO()
    chainer.serializers.save_npz(file, target)
    file.seek(0)
    return file


@pytest.mark.filterwarnings("ignore:the parameters of rank")
@BY_STEPS
@pytest.mark.parametrize("kind", KINDS[::2], ids=lambda kind: type(kind).__name__)
def test_kill_and_resume(kind, local_steps):
    """In the middle, with fragments being exchanged: bit-identical to the run that was not killed."""
    at = 5
    lasting = make(local_steps, kind, chainer.optimizers.MomentumSGD(0.1))
    for step in range(at):
        advance(lasting, gradients(step))
    files = saved(lasting), saved(lasting.target)
    resumed = make(local_steps, kind, chainer.optimizers.MomentumSGD(0.1), model=Net(seed=RANK + 7))
    advance(resumed, gradients(77))  # a running optimizer: its state is replaced
    for file, target in zip(files, (resumed, resumed.target), strict=True):
        chainer.serializers.load_npz(file, target)
    resumed.assume_synchronized()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(at, at + 8):
            advance(lasting, gradients(step))
            advance(resumed, gradients(step))
            assert lasting.is_meeting == resumed.is_meeting
            assert bits(resumed.target.namedparams()) == bits(lasting.target.namedparams())
        for each in (lasting, resumed):
            each.synchronize()
    assert bits(resumed.target.namedparams()) == bits(lasting.target.namedparams())


@several
@BY_KIND
def test_rolling_back_to_before_the_first_meeting_discards_what_was_not_sent(kind):
    optimizer = make(SynchronousFirst(2, LocalSGD(2)), kind)
    advance(optimizer, gradients(0))
    files, ends = (saved(optimizer), saved(optimizer.target)), []
    for _ in range(2):
        for step in range(1, 8):
            advance(optimizer, gradients(step))
        optimizer.synchronize()
        ends.append(bits(optimizer.target.namedparams()))
        for file, target in zip(files, (optimizer, optimizer.target), strict=True):
            file.seek(0)
            chainer.serializers.load_npz(file, target, strict=False)
        optimizer.assume_synchronized()
    assert ends[0] == ends[1]


@several
@pytest.mark.filterwarnings("ignore:the parameters of rank")
def test_what_was_not_sent_is_in_the_snapshot():
    """This tests the test above: without the state, the results differ."""
    lasting = make(LocalSGD(2), OneBit(block=64))
    for step in range(4):
        advance(lasting, gradients(step))
    files = saved(lasting), saved(lasting.target)
    resumed = make(LocalSGD(2), OneBit(block=64))
    for file, target in zip(files, (resumed, resumed.target), strict=True):
        chainer.serializers.load_npz(file, target)
    for reducer in local_steps_of(resumed)._reducers:
        reducer.load_state({})
    for step in range(4, 8):
        advance(lasting, gradients(step))
        advance(resumed, gradients(step))
    assert bits(resumed.target.namedparams()) != bits(lasting.target.namedparams())


@several
@pytest.mark.filterwarnings("ignore:the parameters of rank")
def test_a_snapshot_of_rank_0_on_all_begins_anew_with_one_warning():
    optimizer = make(LocalSGD(2), TopK(0.2))
    for step in range(4):
        advance(optimizer, gradients(step))
    again = make(LocalSGD(2), TopK(0.2))
    chainer.serializers.load_npz(io.BytesIO(COMM.bcast_obj(saved(optimizer).getvalue())), again)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            advance(again, gradients(step))
    assert ["error feedback starts again" in str(each.message) for each in caught] == ([True] if RANK == 0 else [])
    again.synchronize()
    equal_everywhere(again.target.namedparams())


@pytest.mark.filterwarnings("ignore:the parameters of rank")
@pytest.mark.parametrize("local_steps", LOCAL_STEPS[2:5:2])
def test_snapshots_with_compression_and_without_go_together(local_steps):
    optimizers = [make(local_steps, kind) for kind in (Int8(), None)]
    for optimizer in optimizers:
        for step in range(4):
            advance(optimizer, gradients(step))
    files = [saved(optimizer) for optimizer in optimizers]
    for optimizer, file in zip(optimizers, reversed(files), strict=True):
        chainer.serializers.load_npz(file, optimizer)
        for step in range(4):
            advance(optimizer, gradients(step))
        optimizer.synchronize()
        equal_everywhere(optimizer.target.namedparams())


@pytest.mark.parametrize("local_steps", LOCAL_STEPS[::4])
@BY_KIND
def test_a_nan_on_one_rank_reaches_all(kind, local_steps):
    optimizer = make(local_steps, kind)
    for step in range(2):
        advance(optimizer, gradients(step))
    given = gradients(2)
    if RANK == SIZE - 1:
        given["a"][0, 0] = np.nan
    advance(optimizer, given)
    for step in range(3, 9):
        advance(optimizer, gradients(step))
    optimizer.synchronize()
    equal_everywhere(optimizer.target.namedparams())
    assert np.isnan(optimizer.target.a.data[0, 0])
    for reducer in local_steps_of(optimizer)._reducers:
        assert np.isfinite(reducer.compression_report.error_norm)


@pytest.mark.parametrize("delay", [0, 1])
def test_half_precision(delay):
    optimizer = make(StreamingDiLoCo(2, fragments=2, delay=delay), Int8(), model=Net(dtype="f2"))
    for step in range(9):
        advance(optimizer, gradients(step))
    optimizer.synchronize()
    equal_everywhere(optimizer.target.namedparams())
    assert optimizer.target.a.dtype == np.float16


def test_a_model_without_parameters_and_one_that_grows():
    empty = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, LocalSGD(2, send=Int8()))
    empty.setup(chainer.Chain())
    for _ in range(4):
        empty.update()
    empty.synchronize()
    model = chainer.Chain(used=chainer.links.Linear(5, 3), late=chainer.links.Linear(None, 3))
    optimizer = MultiNodeOptimizer(
        chainer.optimizers.SGD(), COMM, StreamingDiLoCo(3, delay=2, fragments=2, send=Int8())
    ).setup(model)
    x = np.random.RandomState(RANK).rand(2, 5).astype("f4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(14):
            link = model.late if step >= 5 else model.used
            optimizer.update(lambda link=link: chainer.functions.sum(link(x)))
    assert optimizer.t == 12
    optimizer.synchronize()
    equal_everywhere(model.namedparams())


@several
def test_the_report_is_of_the_latest_step():
    optimizer = make(LocalSGD(3), Int8())
    assert optimizer.compression_report == (0, 1.0, 0.0)
    for step in range(6):
        advance(optimizer, gradients(step))
        report = optimizer.compression_report
        assert (report.bytes_sent > 0) == (step % 3 == 2)
        assert (0.2 < report.ratio < 0.5) == (step >= 2)
        assert (report.error_norm > 0) == (step >= 2)
    assert make(LocalSGD(3), None).compression_report is None


def test_across_nodes(monkeypatch):
    monkeypatch.setattr(MPI, "Get_processor_name", lambda: f"node{RANK % 2}")
    comm = create_communicator("two_dimensional", MPI.COMM_WORLD.Dup())
    monkeypatch.undo()
    for kind in KINDS:
        for local_steps in LOCAL_STEPS:
            optimizer = make(local_steps, kind, comm=comm)
            for step in range(8):
                advance(optimizer, gradients(step))
            optimizer.synchronize()
            equal_everywhere(optimizer.target.namedparams())
    comm.finalize()


@several
@pytest.mark.parametrize(
    ("error", "message", "mine", "others"),
    [
        (ValueError, r"the same when on every rank, got LocalSGD\(.*, send=compression\) on rank 0", Int8(), None),
        (ValueError, "the same compression on every rank", Int8(), Int8(128)),
        (ValueError, r"the same when on every rank, got .*send=comm_hook\)", lambda bucket: bucket.average(), None),
        (TypeError, r"expected Int8\(\), TopK\(\)", "int8", Int8()),
        (TypeError, r"expected Int8\(\), TopK\(\)", Int8, Int8),
    ],
)
def test_options_that_differ_or_do_not_fit(error, message, mine, others):
    with pytest.raises(error, match=message):
        MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, LocalSGD(2, send=mine if RANK == 0 else others))


def test_communicators_that_do_not_go_with_it():
    with pytest.raises(ValueError, match="flat; got naive"):
        make(LocalSGD(2), Int8(), comm=create_communicator("naive"))
