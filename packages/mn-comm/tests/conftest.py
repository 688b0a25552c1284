import importlib.util
import sys
import types
from pathlib import Path

import pytest
from hypothesis import settings

# For tests that share a stand-in.
sys.path.insert(0, str(Path(__file__).parent / "fakes"))

# Under mpiexec every rank must try the same examples, in the same order, and none may stop to shrink one alone.
settings.register_profile("ranks", derandomize=True, database=None, deadline=None, max_examples=25)
settings.load_profile("ranks")


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
    from mn_comm.device import kernels

    cupy, core = _load("fake_cupy"), _load("fake_nccl")
    core._current_stream = lambda: cupy.get_current_stream().ptr
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setitem(sys.modules, "nccl", types.SimpleNamespace(core=core))
        kernels._kernel.cache_clear()
        yield cupy
        kernels._kernel.cache_clear()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine for the doctor to look at, to be broken."""
    return _load("doctor_fakes").Machine(tmp_path, monkeypatch)


def _load(name):
    path = Path(__file__).parent / "fakes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    missing = _missing_for_gpu() if marked else None
    for item in marked:
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {missing}"))


def _missing_for_gpu():
    """Return why there is no device to run on, or ``None`` if there is one."""
    try:
        import cupy
    except ImportError as error:
        return str(error)
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
