"""The codecs, without MPI: ranks are threads that exchange data through queues."""

import queue
import threading
import types
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mn_compress as compression
from mn_comm.collectives.transport import Transport
from mn_compress import Int8, OneBit, PowerSGD, TopK
from mn_compress.exchange import Memory, Piece, Portion
from mn_compress.int8 import Int8Codec
from mn_compress.one_bit import OneBitCodec
from mn_compress.power_sgd import _cut

ALL = [
    Int8(),
    Int8(block=16, rounding="stochastic"),
    OneBit(block=64),
    OneBit(block=64, start_iter=2),
    TopK(0.3),
    TopK(0.25, warm_up=3),
    PowerSGD(rank=2, start_iter=0),
]
CODECS = [(Int8Codec, 1), (Int8Codec, 8), (Int8Codec, 256), (OneBitCodec, 8), (OneBitCodec, 1024)]
# The operations for devices, tried on NumPy: a different module object with the same functions as for host arrays.
DEVICES = types.SimpleNamespace(**vars(np))
# The last one is what np.nan_to_num writes for an infinity.
SPECIAL = [0.0, -0.0, 1.0, -3.0, np.nan, np.inf, -np.inf, 1e-42, 1e38, -float(np.finfo(np.float32).max)]
BOTH = pytest.mark.parametrize("xp", [np, DEVICES], ids=["host", "device"])


@pytest.fixture(autouse=True, scope="module")
def host_codecs():
    """Let the codecs for the host take the place of the kernels for devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mn_compress.int8.Int8Kernels", Int8Codec)
        patch.setattr("mn_compress.one_bit.OneBitKernels", OneBitCodec)
        yield


values = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=600)


class Request:
    def __init__(self, finish=lambda: None):
        self.finish = finish

    def Test(self):
        return True


class ThreadRanks:
    """One of several ranks that are threads, with the parts of MPI that an exchange uses."""

    operations: ClassVar[set[str]] = set()

    def __init__(self, rank, mail):
        self.rank, self.size, self._mail = rank, len(mail), mail

    def Isend(self, message, other, tag):
        self._mail[other][self.rank].put(message.tobytes())
        return Request()

    def Irecv(self, message, other, tag):
        def finish():
            message[...] = np.frombuffer(self._mail[self.rank][other].get(timeout=10), np.uint8)

        return Request(finish)

    def Allgather(self, mine, all_of_them):
        for other in range(self.size):
            self.Isend(mine.view(np.uint8), other, 0)
        for other in range(self.size):
            self.Irecv(all_of_them[other : other + 1].view(np.uint8), other, 0).finish()

    def wait_with_pauses(self, request, what):
        self.operations.add(what)
        request.finish()


def exchange(how, summands, steps, change=lambda exchanges: None, shape=None, xp=np):
    """Average arrays of several ranks for some steps; return the means for each step and rank, and the exchanges."""
    size, length = len(summands), summands[0].size
    piece = Piece(0, length, shape or (length,), 0)
    exchanges = [how.exchange(Portion(length, [piece], rank, size, xp)) for rank in range(size)]
    means = []
    for step in range(steps):
        mail = [[queue.Queue() for _ in range(size)] for _ in range(size)]
        outs = [summand.copy() for summand in summands]
        errors = []

        def work(rank, mail=mail, outs=outs, step=step, errors=errors):
            try:
                with np.errstate(all="ignore"):
                    exchanges[rank].average(Transport(ThreadRanks(rank, mail)), outs[rank], step)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not errors, errors
        for each in exchanges:
            each.memory.commit()
        change(exchanges)
        means.append(outs)
    return means, exchanges


@pytest.mark.parametrize(("codec", "block"), CODECS)
@given(values)
def test_a_message_and_its_error_are_the_values(codec, block, numbers):
    codec = codec(block)
    original = np.array(numbers, np.float32) / np.float32(len(numbers) * 4)  # the mean of absolute values must fit
    error, decoded = original.copy(), np.full(original.size, 7, np.float32)
    message = np.empty(codec.nbytes(original.size), np.uint8)
    codec.encode(error, message, None)
    codec.decode(message, decoded)
    said = np.full(original.size, 9, np.float32)
    codec.encode(original.copy(), np.empty_like(message), None, said)
    assert said.tobytes() == decoded.tobytes()
    np.testing.assert_allclose(decoded.astype("f8") + error, original, rtol=1e-6, atol=np.abs(original).max() * 1e-6)


@given(values, st.integers(1, 300))
def test_int8_is_exact_to_half_a_step_of_the_blocks_scale(numbers, block):
    codec = Int8Codec(block)
    original = np.array(numbers, np.float32)
    error = original.copy()
    codec.encode(error, np.empty(codec.nbytes(original.size), np.uint8), None)
    for begin in range(0, original.size, block):
        greatest = np.abs(original[begin : begin + block]).max()
        assert np.abs(error[begin : begin + block]).max() <= greatest * (0.5 / 127 + 1e-6) + 2e-36


def test_stochastic_rounding_has_the_value_as_its_mean():
    codec, random = Int8Codec(4), np.random.default_rng(0)
    message, total = np.empty(codec.nbytes(4), np.uint8), np.zeros(4)
    original = np.array([127, 3.25, -7.5, 0.01], np.float32)
    for _ in range(4000):
        said, decoded = np.empty((2, 4), np.float32)
        codec.encode(original.copy(), message, random, said)
        codec.decode(message, decoded)
        assert said.tobytes() == decoded.tobytes()
        total += decoded
    np.testing.assert_allclose(total / 4000, original, atol=0.03)


@pytest.mark.parametrize(("codec", "block"), CODECS)
@given(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=40))
def test_what_is_not_finite_arrives_and_is_not_remembered(codec, block, numbers):
    codec = codec(block)
    original = np.array(numbers, np.float32)
    error, decoded = original.copy(), np.empty(original.size, np.float32)
    message = np.empty(codec.nbytes(original.size), np.uint8)
    with np.errstate(all="ignore"):
        codec.encode(error, message, None)
        codec.decode(message, decoded)
        said = np.empty_like(decoded)
        codec.encode(original.copy(), message, None, said)
    assert said.tobytes() == decoded.tobytes()  # to the last bit, also for zeros and NaN
    assert np.isfinite(error).all()
    bad = ~np.isfinite(original)
    assert not np.isfinite(decoded[bad]).any()
    if isinstance(codec, Int8Codec):
        np.testing.assert_array_equal(decoded[bad], original[bad])
        assert np.isfinite(decoded[~bad]).all()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    "how", [Int8(), Int8(block=16), OneBit(block=64), TopK(0.3), TopK(0.1, momentum=0.5)], ids=repr
)
def test_whole_ranges_get_the_same_bits_as_chunks(how, size, dtype):
    random = np.random.RandomState(0)
    for length in (1, 7, 600, 70_001):
        summands = [random.standard_normal(length).astype(dtype) for _ in range(size)]
        on_host, on_device = (exchange(how, summands, 3, xp=xp) for xp in (np, DEVICES))
        for outs, others in zip(on_host[0], on_device[0], strict=True):
            assert all(out.tobytes() == outs[0].tobytes() for out in (*outs, *others))
        for one, other in zip(on_host[1], on_device[1], strict=True):
            for name, array in one.memory.now.items():
                assert array.tobytes() == other.memory.now[name].tobytes()


@pytest.mark.parametrize("size", [2, 3])
@BOTH
@pytest.mark.parametrize("how", ALL, ids=repr)
def test_all_ranks_get_the_same_bits(how, xp, size):
    random = np.random.RandomState(0)
    for length in (1, 7, 600, 70_000):
        summands = [random.standard_normal(length).astype("f4") for _ in range(size)]
        means, _ = exchange(how, summands, 3, shape=(max(1, length // 100), min(100, length)), xp=xp)
        for outs in means:
            assert all(out.tobytes() == outs[0].tobytes() for out in outs)
            assert np.isfinite(outs[0]).all()


@BOTH
@pytest.mark.parametrize("how", ALL, ids=repr)
def test_all_ranks_are_waited_for(how, xp, monkeypatch):
    """The stall monitor knows this by the names of operations; it also waits for all in an Allgather of lengths."""
    monkeypatch.setattr(ThreadRanks, "operations", set())
    exchange(how, [np.ones(300, np.float32)] * 2, 1, xp=xp)
    assert ThreadRanks.operations
    assert ThreadRanks.operations <= {"Reduce_scatter", "Allgather", "Allgatherv"}


@pytest.mark.parametrize("dtype", ["f2", "f8", "bfloat16"])
@pytest.mark.parametrize("how", ALL, ids=repr)
def test_other_dtypes(how, dtype):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    summands = [np.random.RandomState(rank).uniform(-1, 1, 3000).astype(dtype) for rank in range(2)]
    means, _ = exchange(how, summands, 60, shape=(50, 60))
    assert means[0][0].dtype == dtype
    assert all(outs[0].tobytes() == outs[1].tobytes() for outs in means)
    mean = np.mean([outs[0].astype("f8") for outs in means], axis=0)
    expected = (summands[0].astype("f8") + summands[1].astype("f8")) / 2
    tolerance = 0.9 if isinstance(how, PowerSGD) else 0.06
    assert np.linalg.norm(mean - expected) < tolerance * np.linalg.norm(expected)


# The error that remains after T steps is the omitted part, divided by T. This part is a few times the gradient, and
# about 1 / ratio times the gradient for TopK: with 0.01, an element is sent twice in 200 steps, unless the ratio warms
# up, which takes thousands of steps in the paper.
FED_BACK = [
    *(Int8(), Int8(block=16, rounding="stochastic"), OneBit(block=64), OneBit(), TopK(0.5)),
    *(TopK(0.4, warm_up=10), TopK(0.01, warm_up=1000), PowerSGD(rank=10, start_iter=0, min_compression_rate=1)),
]


def forget(exchanges):
    for each in exchanges:
        for name, array in each.memory.now.items():
            if name == "error":
                array[...] = 0


def error_after(how, steps, change=lambda exchanges: None, xp=np):
    random = np.random.RandomState(1)
    left, right = random.standard_normal((40, 20)), random.standard_normal((20, 50))
    summands = [np.clip(left @ right + rank, -6, 6).astype("f4").reshape(-1) for rank in range(2)]
    means, _ = exchange(how, summands, steps, change, shape=(40, 50), xp=xp)
    mean = np.mean([outs[0].astype("f8") for outs in means], axis=0)
    expected = np.mean(summands, axis=0)
    return np.linalg.norm(mean - expected) / np.linalg.norm(expected)


@BOTH
@pytest.mark.parametrize("how", FED_BACK, ids=repr)
def test_error_feedback_makes_the_mean_of_200_steps_exact(how, xp):
    assert error_after(how, 200, xp=xp) < 0.01


@pytest.mark.parametrize("how", [Int8(block=2048), OneBit(), TopK(0.5), PowerSGD(rank=8, start_iter=0)], ids=repr)
def test_without_error_feedback_it_is_not(how):
    """This tests the test above."""
    assert error_after(how, 200, forget) > (0.002 if isinstance(how, Int8) else 0.05)
    assert error_after(how, 200) < error_after(how, 200, forget) / 5


def test_top_k_of_a_hundredth_needs_hundreds_of_steps_more():
    assert error_after(TopK(0.01), 4000) < 0.01 < 0.1 < error_after(TopK(0.01), 200)
    assert 0.02 < error_after(TopK(0.01, warm_up=1000), 1000) < 0.04  # when the ratio has just reached its final value


@pytest.mark.parametrize("how", ALL, ids=repr)
def test_a_step_that_is_not_committed_leaves_nothing(how, monkeypatch):
    summands = [np.random.RandomState(rank).standard_normal(500).astype("f4") for rank in range(2)]
    means, _ = exchange(how, summands, 4)
    original, calls = Memory.commit, iter(range(10))  # both ranks abandon their second step
    monkeypatch.setattr(Memory, "commit", lambda self: None if next(calls) in (2, 3) else original(self))
    again, _ = exchange(_WithSteps(how, [0, 1, 1, 2, 3]), summands, 5)
    for one, other in zip(means, [again[0], *again[2:]], strict=True):
        assert one[0].tobytes() == other[0].tobytes()


class _WithSteps:
    """A compression that sees different steps from those that the exchange counts."""

    def __init__(self, how, steps):
        self.how, self.steps = how, steps

    def exchange(self, portion):
        made = self.how.exchange(portion)
        average, steps = made.average, iter(self.steps)
        made.average = lambda link, out, step: average(link, out, next(steps))
        return made


@BOTH
@pytest.mark.parametrize("how", ALL, ids=repr)
def test_what_is_not_finite_reaches_all_and_the_next_step_is_finite(how, xp):
    length = 4000
    summands = [np.random.RandomState(rank).standard_normal(length).astype("f4") for rank in range(2)]
    good = [summand.copy() for summand in summands]
    for bad in (np.nan, np.inf, -np.inf):
        summands[1][:] = good[1]
        summands[1][1234] = bad

        def heal(_):
            summands[1][1234] = 0

        means, _ = exchange(how, summands, 2, heal, shape=(40, 100), xp=xp)
        assert all(not np.isfinite(out[1234]) for out in means[0])
        assert all(np.isfinite(out).all() for out in means[1])


@BOTH
def test_zeros_stay_zeros(xp):
    for how in ALL:
        means, exchanges = exchange(how, [np.zeros(300, "f4")] * 2, 3, shape=(15, 20), xp=xp)
        assert not np.any(means)
        assert not any(each.memory.now["error"].any() for each in exchanges)


def test_power_sgd_goes_on_after_zeros():
    how = PowerSGD(rank=2, start_iter=0, min_compression_rate=1)
    zeros = [np.zeros(1200, "f4")] * 2
    ones = np.outer(np.arange(30), np.ones(40)).astype("f4").reshape(-1)
    summands = [np.zeros(1200, "f4"), np.zeros(1200, "f4")]

    def fill(_):
        for summand in summands:
            summand[:] = ones

    assert not np.any(zeros)
    means, _ = exchange(how, summands, 4, fill, shape=(30, 40))
    assert not np.any(means[0])
    np.testing.assert_allclose(means[-1][0], ones, rtol=1e-3, atol=1e-3)


@BOTH
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("how", [OneBit(start_iter=2), PowerSGD(rank=1, start_iter=2)], ids=repr)
def test_the_first_steps_are_exact_and_leave_no_error(how, dtype, xp):
    summands = [np.arange(400, dtype=dtype) % 7, np.arange(400, dtype=dtype) % 5]
    mean = (summands[0] + summands[1]) / 2
    means, exchanges = exchange(how, summands, 2, shape=(20, 20), xp=xp)
    for outs in means:
        for out in outs:
            np.testing.assert_array_equal(out, mean)
    assert not any(each.memory.now["error"].any() for each in exchanges)
    means, exchanges = exchange(how, summands, 3, shape=(20, 20), xp=xp)
    assert np.any(means[2][0] != mean)
    assert all(each.memory.now["error"].any() for each in exchanges)


def test_power_sgd_is_exact_for_matrices_of_its_rank():
    random = np.random.RandomState(0)
    right = random.standard_normal((4, 60))
    summands = [(random.standard_normal((50, 4)) @ right).astype("f4").reshape(-1) for _ in range(3)]
    means, _ = exchange(PowerSGD(rank=4, start_iter=1), summands, 4, shape=(50, 60))
    expected = np.mean(summands, axis=0)
    for outs in (means[0], means[3]):
        np.testing.assert_allclose(outs[0], expected, rtol=1e-3, atol=1e-3)


@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 9), st.integers(1, 5))
def test_pieces_of_matrices_are_cut_into_whole_rows(start, length, rows, columns):
    start, total = start % (rows * columns), rows * columns
    length = min(length, total - start)
    parts = list(_cut(Piece(5, 5 + length, (rows, columns), start)))
    assert parts[0][0].start == 5
    assert parts[-1][0].stop == 5 + length
    assert sum(r * c for _, r, c in parts) == length
    for place, r, c in parts:
        assert place.stop - place.start == r * c
        assert r == 1 or (c == columns and (start + place.start - 5) % columns == 0)


@BOTH
def test_top_k_sends_about_as_much_as_asked_for(xp):
    summands = [np.random.RandomState(rank).standard_normal(1_000_000).astype("f4") for rank in range(2)]
    sent = []

    class Counting(Transport):
        def __init__(self, ranks):
            super().__init__(ranks)
            sent.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(exchange.__globals__, "Transport", Counting)
        exchange(TopK(0.01), summands, 20, xp=xp)
    for link in sent:
        assert link.sent == pytest.approx(60_000, rel=0.3)


def test_the_ratio_falls_while_it_warms_up():
    ratios = [TopK(0.001, warm_up=4).ratio_at(step) for step in range(7)]
    np.testing.assert_allclose(ratios, [0.001 ** (i / 5) for i in (1, 2, 3, 4, 5, 5, 5)])


def test_momentum_correction_and_clipping():
    gradient = np.full(10, 3, "f4")
    means, _ = exchange(TopK(1, momentum=0.5), [gradient, gradient], 3)
    np.testing.assert_allclose([outs[0][0] for outs in means], [3, 3, 3])  # an element that was sent has no velocity
    gradient = np.array([0, 3, 4], "f4")
    means, _ = exchange(TopK(1, clip=5), [gradient, gradient], 1)
    np.testing.assert_allclose(means[0][0], gradient / np.sqrt(2), rtol=1e-6)
    small = np.array([5, 1e-9], "f4")
    means, exchanges = exchange(TopK(0.5, momentum=0.5), [small, small], 2)
    assert exchanges[0].memory.now["velocity"][1] == pytest.approx(1.5e-9)
    assert exchanges[0].memory.now["error"][1] == pytest.approx(2.5e-9)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Int8(block=0), ValueError, "expected block of at least 1, got 0"),
        (lambda: Int8(block=1 << 31), ValueError, "expected block of at most 1073741824, got 2147483648"),
        (lambda: Int8(block=2.5), TypeError, "expected an integer for block, got float: 2.5"),
        (lambda: Int8(rounding="up"), ValueError, "expected rounding 'nearest' or 'stochastic', got 'up'"),
        (lambda: TopK(0), ValueError, "expected a ratio above 0 and at most 1, got 0"),
        (lambda: TopK(1.1), ValueError, "expected a ratio above 0 and at most 1, got 1.1"),
        (lambda: TopK(float("nan")), ValueError, "expected a ratio above 0"),
        (lambda: TopK("1"), TypeError, "expected a number for ratio, got str: '1'"),
        (lambda: TopK(momentum=1), ValueError, "expected momentum of at least 0 and below 1, got 1"),
        (lambda: TopK(clip=0), ValueError, "expected clip above 0, got 0"),
        (lambda: TopK(warm_up=-1), ValueError, "expected warm_up of at least 0, got -1"),
        (lambda: PowerSGD(rank=0), ValueError, "expected rank of at least 1, got 0"),
        (lambda: PowerSGD(start_iter=True), TypeError, "expected an integer for start_iter, got bool"),
        (lambda: PowerSGD(min_compression_rate=0), ValueError, "expected min_compression_rate above 0, got 0"),
        (lambda: OneBit(start_iter=-1), ValueError, "expected start_iter of at least 0, got -1"),
        (lambda: OneBit(block=12), ValueError, "expected a multiple of 8 for block, got 12"),
    ],
)
def test_bad_numbers(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_they_are_immutable_and_say_what_they_are():
    with pytest.raises(AttributeError):
        Int8().block = 3
    assert repr(TopK(0.1)) == "TopK(ratio=0.1, momentum=0.0, clip=None, warm_up=0)"
    assert repr(TopK(np.float64(0.5), warm_up=np.int64(2))) == repr(TopK(0.5, warm_up=2))
    assert repr(PowerSGD(np.int32(2), np.int64(5), 2)) == repr(PowerSGD(2, 5, 2.0))
    assert repr(OneBit(np.int64(64))) == "OneBit(block=64, start_iter=0)"
    assert isinstance(compression, types.ModuleType)
    assert all(issubclass(each, compression.Compression) for each in (Int8, OneBit, PowerSGD, TopK))
