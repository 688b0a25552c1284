"""For tests with real devices: this rank's device, communicators, and arrays of random numbers."""

import importlib.util
import os
import time

import numpy as np
import pytest

SHARING = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "") not in ("", "0")


@pytest.fixture(scope="module")
def devices(world):
    """Choose this rank's device; return how many there are."""
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(world.rank % count).use()
    return count


@pytest.fixture
def trace(devices):
    """What the program asks the device to do, recorded within a block: an emulated device keeps it."""
    return pytest.importorskip("gpu_emulator.tracing", reason="needs an emulated GPU").Trace()


@pytest.fixture
def cuda_aware(devices, monkeypatch):
    """Let MPI be given addresses on the device: those of an emulated device are in host memory."""
    if not is_emulated():
        pytest.skip("this MPI library may not be CUDA-aware")
    monkeypatch.setenv("MN_COMM_CUDA_AWARE_MPI", "1")


@pytest.fixture
def make(devices, world):
    from mn_comm import create_communicator

    made = []

    def make(name, *args, **settings):
        if name == "pure_nccl" and devices < world.size and not SHARING:
            pytest.skip("ranks share a GPU and NCCL_MULTI_RANK_GPU_ENABLE is not set")
        made.append(create_communicator(name, *args, **settings))
        return made[-1]

    yield make
    for comm in made:
        comm.finalize()


def is_emulated():
    import cupy

    return b"emulated" in cupy.cuda.runtime.getDeviceProperties(0)["name"].lower()


def has_bfloat16():
    """CuPy 14 and newer compute with the bfloat16 of ml_dtypes."""
    import cupy

    return importlib.util.find_spec("ml_dtypes") is not None and int(cupy.__version__.split(".")[0]) >= 14


def random(shape, dtype, rank, seed):
    return np.asarray(np.random.RandomState(seed * 100 + rank).uniform(-1, 1, shape), dtype)


def average(reducer, model, in_background):
    """Average the gradients of a model in a thread, or in this one."""
    if in_background:
        reduction = reducer.start(model, zero_fill=False)
        reduction.ready_all()
        reduction.wait()
    else:
        reducer.average(model)


def slow(stream, seconds=0.2):
    """Let everything that is put on a stream from now on begin later."""
    stream.launch_host_func(lambda _: time.sleep(seconds), None)
