"""The binding and the real nccl4py, which can be imported without a device."""

import importlib.util
import inspect

import numpy as np
import pytest

from mn_comm.device import nccl


@pytest.mark.skipif(importlib.util.find_spec("nccl") is None, reason="needs nccl4py")
@pytest.mark.parametrize(
    ("name", "arguments", "keywords"),
    [
        ("init", (2, 0, "unique_id"), ()),
        ("allreduce", ("send", "recv", "op"), ("stream",)),
        ("reduce", ("send", "recv", "op", 0), ("stream",)),
        ("reduce_scatter", ("send", "recv", "op"), ("stream",)),
        ("allgather", ("send", "recv"), ("stream",)),
        ("broadcast", ("send", "recv", 0), ("stream",)),
        ("send", ("send", 1), ("stream",)),
        ("recv", ("recv", 1), ("stream",)),
        ("destroy", (), ()),
        ("abort", (), ()),
    ],
)
def test_the_binding_takes_what_it_is_given(name, arguments, keywords):
    from nccl import core

    own = () if name == "init" else ("self",)
    inspect.signature(getattr(core.Communicator, name)).bind(*own, *arguments, **dict.fromkeys(keywords))


@pytest.mark.skipif(not nccl._available, reason="needs CuPy and nccl4py")
def test_the_binding_is_there():
    from nccl import core

    assert nccl.get_version() >= 23000
    assert nccl.get_build_version() >= 23000
    assert core.SUM is core.NcclRedOp.SUM
    assert bytes(core.UniqueId.from_bytes(bytes(range(128)))) == bytes(range(128))
    for name in ("float16", "float32", "float64", "int8", "uint8", "int32", "uint32", "int64", "uint64"):
        assert nccl.supports(np.dtype(name))
        core.NcclDataType(np.dtype(name))
