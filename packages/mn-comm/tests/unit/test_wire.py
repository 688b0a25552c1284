import numpy as np
import pytest
from mpi4py import MPI
from mpi4py.util import dtlib

from mn_comm.basis import wire


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8", "g", "c8", "c16"])
def test_dtypes_that_are_added_up_as_they_are(kind):
    assert wire.check_sum(np.dtype(kind), "allreduce") == np.dtype(kind)
    assert wire.has_mpi_datatype(np.dtype(kind))


def test_no_datatypes_of_mpi_pile_up(monkeypatch):
    made = []
    find = dtlib.from_numpy_dtype
    monkeypatch.setattr(dtlib, "from_numpy_dtype", lambda dtype: made.append(find(dtype)) or made[-1])
    wire.has_mpi_datatype.cache_clear()
    for _ in range(3):
        wire.check_sum(np.dtype("f4"), "allreduce")
    assert made == [MPI.DATATYPE_NULL]  # one, and it was freed


def test_half_precision_is_added_up_in_float32():
    assert wire.check_sum(np.dtype("f2"), "allreduce") == np.float32


@pytest.mark.parametrize("kind", ["?", "U3", "S3", "M8[s]", "m8[s]", "i4,f4", "O", ">f4"])
def test_dtypes_that_cannot_be_added_up(kind):
    with pytest.raises(TypeError, match="allreduce: expected an integer, floating or complex dtype"):
        wire.check_sum(np.dtype(kind), "allreduce")


@pytest.mark.parametrize("value", [[1.0], 1.0, None, np.float32(1)])
def test_only_arrays_travel(value):
    with pytest.raises(TypeError, match=r"bcast: expected a numpy.ndarray, got"):
        wire.check_array(value, "bcast")


@pytest.mark.parametrize("dtype", [object, [("a", "i4"), ("b", "O")]])
def test_arrays_of_objects_do_not_travel(dtype):
    with pytest.raises(TypeError, match="bcast: expected a dtype without Python objects, got dtype"):
        wire.check_array(np.empty(2, dtype=dtype), "bcast")


def test_ranks():
    assert wire.check_rank(np.int64(1), 2, "root") == 1
    with pytest.raises(ValueError, match=r"expected root in 0\.\.1, got 2"):
        wire.check_rank(2, 2, "root")
    with pytest.raises(ValueError, match="got -1"):
        wire.check_rank(-1, 2, "root")
    with pytest.raises(TypeError, match=r"expected an integer for root, got float: 1\.0"):
        wire.check_rank(1.0, 2, "root")


def test_tags():
    assert wire.check_tag(0) == 0
    with pytest.raises(ValueError, match=r"expected tag in 0\.\."):
        wire.check_tag(-5)
    with pytest.raises(ValueError, match=r"expected tag in 0\.\."):
        wire.check_tag(2**62)
