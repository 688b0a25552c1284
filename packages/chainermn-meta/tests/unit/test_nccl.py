"""What of ``chainermn.nccl`` needs no GPU."""

import sys

import pytest
from chainermn import nccl


def test_numbers_are_those_of_nccl():
    assert (nccl.NCCL_SUM, nccl.NCCL_PROD, nccl.NCCL_MAX, nccl.NCCL_MIN) == (0, 1, 2, 3)
    assert (nccl.NCCL_FLOAT16, nccl.NCCL_FLOAT32, nccl.NCCL_FLOAT64) == (6, 7, 8)
    assert (nccl.NCCL_HALF, nccl.NCCL_FLOAT, nccl.NCCL_DOUBLE) == (6, 7, 8)
    assert (nccl.NCCL_CHAR, nccl.NCCL_INT) == (nccl.NCCL_INT8, nccl.NCCL_INT32) == (0, 2)
    assert (nccl.NCCL_UINT8, nccl.NCCL_UINT32, nccl.NCCL_INT64, nccl.NCCL_UINT64) == (1, 3, 4, 5)


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="expected CuPy and nccl4py"):
        nccl.NcclCommunicator(1, b"", 0)
