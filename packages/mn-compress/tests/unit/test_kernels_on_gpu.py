"""The kernels that quantise on a device, beside the codecs for the host."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mn_compress.int8 import Int8Codec
from mn_compress.kernels import Int8Kernels, OneBitKernels
from mn_compress.one_bit import OneBitCodec

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

TINY = np.finfo(np.float32).tiny
PAIRS = [*((Int8Codec, Int8Kernels, block) for block in (1, 8, 100, 256, 4096, 5000, 40_000))]
PAIRS += [(OneBitCodec, OneBitKernels, block) for block in (8, 24, 1024, 4096, 4104, 65_536)]
BOTH = pytest.mark.parametrize(("on_host", "on_device", "block"), PAIRS)
# The last one is what np.nan_to_num writes for an infinity.
SPECIAL = [0.0, -0.0, 1.0, -3.0, np.nan, np.inf, -np.inf, 1e-42, -1e-38, 1e-36, 1e38, -float(np.finfo(np.float32).max)]


def encoded(codec, original, xp, random=None):
    """Return the scales and the codes of a message, the omitted part, and the decoded values: all in host memory."""
    room = xp.full(codec.nbytes(original.size) + 64, 77, np.uint8)
    message = room[:-64]
    error, decoded = (xp.full(original.size + 16, 7, np.float32) for _ in range(2))
    error[:-16] = xp.asarray(original)
    with np.errstate(all="ignore"):
        codec.encode(error[:-16], message, random)
        codec.decode(message, decoded[:-16])
    assert (room[-64:] == 77).all()  # nothing is written after the end
    assert (error[-16:] == 7).all()
    assert (decoded[-16:] == 7).all()
    found = (*codec.split(message, original.size), error, decoded)
    return [np.array(each if xp is np else each.get()) for each in found]


def canonical(array):
    """Return an array in which all NaN are the same one; subnormal numbers are zero, as in CuPy's kernels."""
    if array.dtype == np.float32:
        array = np.where(np.isnan(array), np.float32(np.nan), array)
        array = np.where(np.abs(array) < TINY, np.float32(0), array)
    return array


def check_equal(on_host, on_device, block, original):
    expected = encoded(on_host(block), original, np)
    actual = encoded(on_device(block), original, cupy)
    assert np.isfinite(actual[2]).all()
    if on_host is OneBitCodec:  # the device adds up in another order
        scales, codes, *others = expected
        np.testing.assert_allclose(actual[0], scales, rtol=1e-5, atol=TINY)
        assert actual[1].tobytes() == codes.tobytes()
        near = 1e-5 * np.repeat(scales, block)[: original.size] + 1e-6 * np.abs(original) + TINY
        for one, other in zip(actual[2:], others, strict=True):
            np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))
            difference = np.abs(np.subtract(one, other, where=np.isfinite(one), out=np.zeros_like(one)))
            assert not (difference[:-16] > near).any()
        return
    for one, other in zip(actual, expected, strict=True):
        assert canonical(one).tobytes() == canonical(other).tobytes()


@BOTH
@pytest.mark.parametrize("length", [1, 31, 32, 33, 255, 256, 257, 5000, 70_001])
def test_the_same_as_on_the_host(on_host, on_device, block, length):
    random = np.random.RandomState(length)
    check_equal(on_host, on_device, block, random.standard_normal(length).astype("f4"))
    wide = random.standard_normal(length) * 10.0 ** random.uniform(-37, 37, length)
    check_equal(on_host, on_device, block, (wide / block).astype("f4"))


@BOTH
@given(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=40))
def test_special_values_are_the_same_as_on_the_host(on_host, on_device, block, numbers):
    check_equal(on_host, on_device, block, np.array(numbers, np.float32))


@BOTH
def test_one_special_value_in_a_block(on_host, on_device, block):
    for bad in (np.nan, np.inf, -np.inf):
        original = np.random.RandomState(0).standard_normal(10_000).astype("f4")
        original[5000] = bad
        check_equal(on_host, on_device, block, original)


def rounded(value, random):
    """Return what many equal values are rounded to, in a block whose scale is 1."""
    original = np.full(300_000, value, np.float32)
    original[::300] = 127
    _, codes, error, decoded = encoded(Int8Kernels(300), original, cupy, random)
    np.testing.assert_array_equal(codes.view(np.int8), decoded[:-16])
    np.testing.assert_allclose((error + decoded)[:-16], original, atol=1e-5)
    return np.delete(decoded[:-16], np.s_[::300]).astype("f8")


def test_stochastic_rounding_has_the_value_as_its_mean():
    for value in (3.25, -7.5, 0.01, 126.999, 0):
        found = rounded(value, np.random.default_rng(0))
        assert set(found) <= {np.floor(value), np.ceil(value)}
        assert abs(found.mean() - value) < 5 * 0.5 / np.sqrt(found.size)


def test_stochastic_rounding_is_independent_of_place_and_step():
    random = np.random.default_rng(0)
    first, second = rounded(0.5, random), rounded(0.5, random)
    np.testing.assert_array_equal(rounded(0.5, np.random.default_rng(0)), first)
    for one, other in ((first, second), *((first[:-n], first[n:]) for n in (1, 2, 32, 256, 1024))):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.01


def test_on_the_device_of_the_arrays():
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")
    original = np.random.RandomState(0).standard_normal(5000).astype("f4")
    for device in (1, 0):
        with cupy.cuda.Device(device):
            check_equal(Int8Codec, Int8Kernels, 256, original)
            check_equal(OneBitCodec, OneBitKernels, 1024, original)
