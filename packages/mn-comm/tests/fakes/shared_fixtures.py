"""Fixtures of this package, and of the packages that are tested with its stand-ins."""

import functools
import importlib.util
import sys
import types
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(params=["naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware"])
def name(request):
    return request.param


@pytest.fixture
def comm(world):
    from mn_comm import create_communicator

    communicator = create_communicator("naive")
    yield communicator
    communicator.finalize()


@pytest.fixture(scope="module")
def fake_cupy():
    """Put the stand-ins for CuPy and nccl4py in the place of the real ones; returns CuPy's."""
    from mn_comm import nccl
    from mn_comm.device import kernels

    cupy, core = _load("fake_cupy"), _load("fake_nccl")
    core._current_stream = lambda: cupy.get_current_stream().ptr
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setitem(sys.modules, "nccl", types.SimpleNamespace(core=core))
        patch.setitem(sys.modules, "nccl.bindings.nccl", types.SimpleNamespace(NCCLError=core.NCCLError))
        kernels._kernel.cache_clear()
        yield cupy
        kernels._kernel.cache_clear()
        nccl._alive.clear()  # their module will be removed


@functools.cache  # objects that use them may be stored with MPI_COMM_WORLD, longer than one test module
def _load(name):
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
