"""Wrong input on one rank raises on every rank, and the communicator still works afterwards."""

import numpy as np
import pytest
from mpi4py import MPI

import mn_comm
from mn_comm import create_communicator
from mn_comm.device import nccl

pytestmark = pytest.mark.sizes(1)

COMM = create_communicator("flat")
RANK, SIZE = COMM.rank, COMM.size
LAST = SIZE - 1


@pytest.fixture(autouse=True)
def nothing_is_left_over():
    yield
    np.testing.assert_array_equal(COMM.allreduce(np.ones(2)), [SIZE, SIZE])


def on_last(good, bad):
    return bad if RANK == LAST else good


OBJECTS = np.array([object()])
MASKED = np.ma.masked_equal([1.0, 2.0, 3.0], 2.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: COMM.bcast(OBJECTS, root=0), TypeError, "bcast: expected a dtype without Python objects, got dtype"),
        (lambda: COMM.bcast([1, 2], root=0), TypeError, r"bcast: expected a numpy.ndarray, got list"),
        (lambda: COMM.bcast((np.zeros(1),), root=0), TypeError, r"bcast: expected a numpy.ndarray, got tuple"),
        (lambda: COMM.bcast(np.zeros(1), root=on_last(0, SIZE)), ValueError, r"expected root in 0\.\."),
        (
            lambda: COMM.gather(np.zeros(1), root=on_last(0, "0")),
            TypeError,
            "expected an integer for root, got str: '0'",
        ),
        (lambda: COMM.scatter([np.zeros(1)] * SIZE, root=on_last(0, -1)), ValueError, r"expected root in 0\.\."),
        (lambda: COMM.bcast_obj(1, root=on_last(0, SIZE)), ValueError, r"expected root in 0\.\."),
        (lambda: COMM.gather_obj(1, root=on_last(0, None)), TypeError, "expected an integer for root, got NoneType"),
        (lambda: COMM.scatter_obj([1] * SIZE, root=on_last(0, 1.0)), TypeError, "expected an integer for root, got fl"),
        (lambda: COMM.bcast(MASKED), TypeError, "bcast: expected an array without a mask, .* got numpy.ma.MaskedArray"),
        (
            lambda: COMM.allreduce(on_last(np.zeros(3), MASKED)),
            TypeError,
            "allreduce: expected an array without a mask",
        ),
        (lambda: COMM.gather(on_last(np.zeros(1), OBJECTS)), TypeError, "gather: expected a dtype without Python"),
        (lambda: COMM.gather(on_last(np.zeros(1), 3)), TypeError, r"gather: expected a numpy.ndarray, got int"),
        (lambda: COMM.allgather(on_last(np.zeros(1), None)), TypeError, r"allgather: .* got NoneType"),
        (
            lambda: COMM.scatter([np.zeros(1)] * (SIZE + 1)),
            ValueError,
            f"scatter: expected {SIZE} parts, .* got {SIZE + 1}",
        ),
        (
            lambda: COMM.scatter(np.zeros((SIZE + 2, 2))),
            ValueError,
            f"scatter: expected {SIZE} parts, .* got {SIZE + 2}",
        ),
        (lambda: COMM.scatter(np.array(1.0)), ValueError, "scatter: .* got a scalar array"),
        (lambda: COMM.scatter(None), TypeError, "scatter: expected an array or a tuple of"),
        (lambda: COMM.scatter([3] * SIZE), TypeError, r"scatter: expected a numpy.ndarray, got int"),
        (lambda: COMM.alltoall(on_last([np.zeros(1)] * SIZE, [])), ValueError, f"alltoall: expected {SIZE} arrays"),
        (lambda: COMM.alltoall(on_last([np.zeros(1)] * SIZE, 5)), TypeError, "alltoall: expected a tuple of"),
        (lambda: COMM.allreduce(on_last(np.zeros(1), "x")), TypeError, r"allreduce: expected a numpy.ndarray, got str"),
        (lambda: COMM.allreduce(np.zeros(1), op=on_last("sum", "mean")), ValueError, "sum, prod, max, min; got 'mean'"),
        (lambda: COMM.reduce(np.zeros(1), root=on_last(0, SIZE)), ValueError, r"expected root in 0\.\."),
        (
            lambda: COMM.reduce_scatter(np.zeros(())),
            ValueError,
            r"a first axis whose length is a multiple of \d, got \(",
        ),
        (
            lambda: COMM.allreduce(on_last(np.zeros(1), np.array("x"))),
            TypeError,
            "allreduce: expected an integer, float",
        ),
        (lambda: COMM.split(on_last(0, "a"), 0), TypeError, "expected an integer for color, got str: 'a'"),
        (lambda: COMM.split(0, on_last(0, 1.5)), TypeError, "expected an integer for key, got float: 1.5"),
        (lambda: COMM.split(on_last(0, -2), 0), ValueError, "expected a color of at least 0, got -2"),
        (lambda: COMM.split(on_last(0, 2**70), 0), ValueError, "expected color and key to fit into 32 bits, got 118"),
        (lambda: COMM.split(0, on_last(0, 2**31)), ValueError, "expected color and key to fit into 32 bits, got 0 "),
        (lambda: COMM.set_config("nonsense", 1), ValueError, "got 'nonsense'"),
        (lambda: COMM.get_config("nonsense"), ValueError, "got 'nonsense'"),
    ],
)
def test_all_ranks_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("wrong", [None, "flat", MPI.COMM_NULL])
def test_no_communicator(wrong):
    with pytest.raises(TypeError, match="expected a communicator, got"):
        mn_comm.expect_same(wrong, "number of classes", 10)
    with pytest.raises(TypeError, match="expected a communicator, got"), mn_comm.raise_on_all(wrong):
        pass


DIFFERENT_ROOTS = rf"expected the same root on every rank, got 0 on rank 0 and 1 on rank {LAST}"


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: COMM.allreduce(on_last(np.zeros(2), np.zeros(3))),
            ValueError,
            rf"\(\(3,\), 'float64', 'sum'\) on rank {LAST}",
        ),
        (lambda: COMM.allreduce(on_last(np.zeros(2, "f4"), np.zeros(2))), ValueError, "'float32'.* on rank 0 and"),
        (lambda: COMM.allreduce(np.zeros(2), op=on_last("sum", "max")), ValueError, "'sum'.* on rank 0 and .*'max'"),
        (lambda: COMM.reduce(np.zeros(2), root=on_last(0, 1)), ValueError, DIFFERENT_ROOTS),
        (lambda: COMM.bcast(np.zeros(2), root=on_last(0, 1)), ValueError, DIFFERENT_ROOTS),
        (lambda: COMM.bcast(on_last(np.zeros(2), None), root=on_last(0, 1)), ValueError, DIFFERENT_ROOTS),
        (lambda: COMM.gather(np.zeros(2), root=on_last(0, 1)), ValueError, DIFFERENT_ROOTS),
        (lambda: COMM.scatter([np.zeros(2)] * SIZE, root=on_last(0, 1)), ValueError, DIFFERENT_ROOTS),
        (lambda: COMM.bcast_obj("a", root=on_last(0, 1)), ValueError, DIFFERENT_ROOTS),
        (lambda: COMM.gather_obj("a", root=on_last(0, 1)), ValueError, DIFFERENT_ROOTS),
        (lambda: COMM.scatter_obj(["a"] * SIZE, root=on_last(0, 1)), ValueError, DIFFERENT_ROOTS),
        (lambda: COMM.reduce_scatter(np.zeros(on_last(1, 2) * SIZE)), ValueError, "reduce_scatter: expected arrays of"),
        (
            lambda: COMM.gather(on_last(np.zeros(2), np.zeros(2, "i4"))),
            TypeError,
            f"float64 on rank 0 and int32 on rank {LAST}",
        ),
        (lambda: COMM.allgather(on_last(np.zeros(2), np.zeros(2, "i4"))), TypeError, "float64 on rank 0 and int32"),
        (
            lambda: COMM.alltoall([np.zeros(1), *[np.zeros(1, "i4")] * LAST]),
            TypeError,
            "alltoall: expected the same dtype for every rank, got float64 for rank 0 and int32 for rank 1",
        ),
        (
            lambda: COMM.scatter([np.zeros(1), *[np.zeros(1, "i4")] * LAST]),
            TypeError,
            "scatter: expected the same dtype",
        ),
    ],
)
def test_ranks_that_differ(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_names_of_communicators():
    with pytest.raises(
        ValueError, match=r"expected a communicator's name, one of hierarchical, two_dimensional, .*; got 'naiv'"
    ):
        create_communicator("naiv")
    if not nccl._available:
        with pytest.raises(
            RuntimeError, match=r"CuPy and nccl4py, which NCCL needs: .*: pip install 'mn-comm\[cuda13\]'"
        ):
            create_communicator("pure_nccl")
    with pytest.raises(TypeError, match="expected an mpi4py intracommunicator for mpi_comm, got str"):
        create_communicator("naive", "world")
    with pytest.raises(ValueError, match="for allreduce_grad_dtype, got int32"):
        create_communicator("flat", allreduce_grad_dtype=on_last(None, np.int32))
    with pytest.raises(ValueError, match=r"one of hierarchical, .*; got 'naiv'"):
        create_communicator(on_last("naive", "naiv"))


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({"communicator_name": "naive"}, {"communicator_name": "flat"}),
        ({"allreduce_grad_dtype": None}, {"allreduce_grad_dtype": "float16"}),
        ({"batched_copy": False}, {"batched_copy": True}),
    ],
)
def test_communicators_that_differ(options, others):
    with pytest.raises(ValueError, match="expected the same communicator_name, allreduce_grad_dtype, batched_copy, el"):
        create_communicator(**on_last(options, others))
