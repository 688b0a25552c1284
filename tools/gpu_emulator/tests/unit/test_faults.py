"""Deliberate mistakes on one emulated device: the emulator finds each, and names the line."""

import concurrent.futures
import contextlib
import threading

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
faults = pytest.importorskip("gpu_emulator.faults", reason="needs an environment changed by build.py")

pytestmark = pytest.mark.gpu


def pinned(count):
    memory = cupy.cuda.alloc_pinned_memory(4 * count)
    return np.frombuffer(memory, "f4", count)


@contextlib.contextmanager
def busy(stream):
    """Keep a stream busy until the end of the block."""
    end = threading.Event()
    stream.launch_host_func(lambda _: end.wait(30), None)  # not forever: what is checked may wait for the stream
    try:
        yield end
    finally:
        end.set()


def found_before(end):
    """Return the first mistake, and let the stream go on then; or an empty string if it has gone on already."""
    text = ""
    while not text and not end.wait(0.01):
        text = faults.take()
    end.set()
    return text


def found():
    cupy.cuda.Device().synchronize()
    return faults.take()


def test_right_programs_have_none():
    host = pinned(1000)
    host[...] = 3
    device = cupy.empty(1000, "f4")
    device.set(host)
    np.testing.assert_array_equal((device + 1).get(), 4)
    assert found() == ""


def test_pinned_memory_that_is_overwritten_before_its_copy():
    stream = cupy.cuda.Stream(non_blocking=True)
    host, device = pinned(1000), cupy.empty(1000, "f4")
    host[...] = 3
    with busy(stream):
        device.set(host, stream=stream)
        host[...] = 4
    stream.synchronize()
    text = found()
    assert "overwritten before a copy" in text
    assert "test_faults.py" in text


def test_a_result_that_is_read_too_early():
    stream = cupy.cuda.Stream(non_blocking=True)
    host, device = pinned(1000), cupy.full(1000, 3, "f4")
    cupy.cuda.Device().synchronize()
    host[...] = 3
    with busy(stream):
        device.get(stream=stream, out=host, blocking=False)
        assert not (host == 3).any()  # also if it happens to be equal to what was there before
    stream.synchronize()
    assert (host == 3).all()
    assert found() == ""


def test_a_missing_wait_between_streams():
    one, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    array = cupy.zeros(10, "f4")
    array += 0  # compiles the kernels
    array.copy()
    cupy.cuda.Device().synchronize()
    with busy(one):
        with one:
            array += 1
        with other:
            seen = array.copy()
        other.synchronize()
        assert not seen.get(stream=other).any()
    assert found() == ""


def test_memory_that_is_unregistered_before_its_copy_has_ended():
    runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
    host, device = np.ones(1000, "f4"), cupy.empty(1000, "f4")
    runtime.hostRegister(host.ctypes.data, host.nbytes, 0)
    with concurrent.futures.ThreadPoolExecutor() as thread, busy(stream) as end:
        device.set(host, stream=stream)
        text = thread.submit(found_before, end)  # because the call waits for the stream
        runtime.hostUnregister(host.ctypes.data)
    assert "memory is unregistered before a copy of it has ended" in text.result()


def test_a_copy_that_leaves_pinned_memory():
    runtime = cupy.cuda.runtime
    host, device = np.ones(1000, "f4"), cupy.empty(1000, "f4")
    runtime.hostRegister(host.ctypes.data, 400, 0)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        device.get(out=host)
    runtime.hostUnregister(host.ctypes.data)
    assert "4000 bytes leave an allocation, or pinned memory, of 400" in found()


def test_a_copy_beyond_an_allocation():
    runtime = cupy.cuda.runtime
    address, host = runtime.malloc(400), np.ones(1000, "f4")
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        runtime.memcpy(address, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice)
    runtime.free(address)
    assert "4000 bytes leave an allocation, or pinned memory, of 400" in found()


def test_memory_that_is_used_after_it_was_freed():
    runtime = cupy.cuda.runtime
    address, host = runtime.malloc(4000), np.ones(1000, "f4")
    runtime.free(address)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        runtime.memcpy(address, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice)
    assert "memory is used after it was freed" in found()


def test_a_stream_that_is_used_after_it_was_destroyed():
    runtime = cupy.cuda.runtime
    stream = runtime.streamCreate()
    ended = []
    runtime.launchHostFunc(stream, ended.append, True)
    runtime.streamDestroy(stream)
    cupy.cuda.Device().synchronize()
    assert found() == ""
    assert ended == [True]  # what was enqueued before is executed
    runtime.launchHostFunc(stream, ended.append, True)
    assert "a stream is used after it was destroyed" in found()


def test_an_event_of_another_device():
    with cupy.cuda.Device(1):
        event = cupy.cuda.Event()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorInvalidResourceHandle"):
        event.record(cupy.cuda.Stream.null)
    assert "an event of device 1 is recorded on a stream of device 0" in found()


def test_a_stream_of_another_device():
    array = cupy.zeros(10, "f4")
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
    kernel = cupy.RawKernel('extern "C" __global__ void set(float* x) { x[threadIdx.x] = 1; }', "set")
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        kernel((1,), (10,), (array,), stream=stream)
    assert "on a stream of device 1" in found()
