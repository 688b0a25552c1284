"""One process on a real device: packing, staging and NCCL among one rank."""

import itertools

import numpy as np
import pytest
from fake_model import Model, Param
from on_gpu import has_bfloat16, slow

from mn_comm import create_communicator
from mn_comm.basis import placement
from mn_comm.basis.config import Config
from mn_comm.device import kernels, nccl, staging
from mn_comm.device.bucket import DeviceBucket
from mn_comm.device.strategies import Alone
from mn_comm.gradients.filling import fill_buckets
from mn_comm.gradients.parts import Exchanged

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

FLOATS = ["f2", "f4", "f8", *(["bfloat16"] if has_bfloat16() else [])]
SHAPES = [(3,), (), (0,), (129, 17), (1,), (64, 3, 7, 7), (5000,)]


def dtype_of(name):
    if name == "bfloat16":
        from ml_dtypes import bfloat16

        return np.dtype(bfloat16)
    return np.dtype(name)


def laid_out(array, which):
    if which == "fortran" and array.ndim > 1:
        return cupy.asfortranarray(array)
    if which == "unaligned":  # begins one element after an aligned address
        room = cupy.empty(array.size + 1, array.dtype)[1:]
        room[...] = array.ravel()
        return room.reshape(array.shape)
    return array[::-1].copy()[::-1] if which == "reversed" and array.ndim else array


@pytest.mark.parametrize("layout", ["c", "fortran", "reversed", "unaligned"])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(("grad", "wire"), list(itertools.product(FLOATS, FLOATS)))
def test_packing_and_unpacking(grad, wire, batched, layout):
    grad, wire = dtype_of(grad), dtype_of(wire)
    random = np.random.RandomState(0)
    values = [np.asarray(random.uniform(-1, 1, shape)).astype(grad) for shape in SHAPES]
    arrays = [laid_out(cupy.asarray(value), layout) for value in values]
    specs = [(str(i), value.shape, grad) for i, value in enumerate(values)]
    (parts,) = fill_buckets(specs, range(len(specs)), None, whole=True)
    whole, config = cupy.empty(parts[-1].end, wire), Config(batched_copy=batched)
    bucket = DeviceBucket(0, Exchanged(0, parts, specs, 0), whole, Alone(None), config)
    bucket.pack([None if i == 3 else array for i, array in enumerate(arrays)])
    bucket.flat *= wire.type(2)
    bucket.unpack(arrays, bucket.flat)
    for i, (array, value) in enumerate(zip(arrays, values, strict=True)):
        expected = np.zeros_like(value) if i == 3 else (value.astype(wire) * wire.type(2)).astype(grad)
        np.testing.assert_array_equal(array.get().astype("f8"), expected.astype("f8"))
        assert array.dtype == grad


def test_a_stream_that_comes_later_waits_for_the_one_before():
    specs = [(str(i), (1000,), np.dtype("f4")) for i in range(3)]
    (parts,) = fill_buckets(specs, range(3), None, whole=True)
    whole = cupy.empty(parts[-1].end, "f4")
    bucket = DeviceBucket(0, Exchanged(0, parts, specs, 0), whole, Alone(None), Config())
    first, second = ([cupy.full(1000, float(10 * step + i), "f4") for i in range(3)] for step in range(2))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for arrays, stream in zip((first, second), streams, strict=True):
        with stream:
            bucket.pack(arrays)
            bucket.flat += 100
            slow(stream)
            bucket.unpack(arrays, bucket.flat)
    cupy.cuda.Device().synchronize()
    for step, arrays in enumerate((first, second)):
        for i, array in enumerate(arrays):
            np.testing.assert_array_equal(array.get(), 100 + 10 * step + i)


def test_a_table_that_changes_before_it_was_copied():
    """The host continues while the copy of the first table waits in the stream."""
    first, second = cupy.arange(10, dtype="f4"), cupy.arange(100, 110, dtype="f4")
    table, packed, dtype = kernels.Table([0], 10), cupy.empty(10, "f4"), np.dtype("f4")
    kernels.pack(table, [first], dtype, packed)  # compiles the kernel
    kernels.pack(table, [second], dtype, packed)
    cupy.cuda.Device().synchronize()
    slow(cupy.cuda.get_current_stream())
    kernels.pack(table, [first], dtype, packed)
    seen = packed.copy()
    kernels.pack(table, [second], dtype, packed)
    np.testing.assert_array_equal(seen.get(), np.arange(10))
    np.testing.assert_array_equal(packed.get(), np.arange(100, 110))


def test_on_another_stream():
    comm = create_communicator("non_cuda_aware")
    with cupy.cuda.Stream(non_blocking=True):
        model = Model(a=Param(None, cupy.arange(1000, dtype="f4")))
        for _ in range(10):
            comm.multi_node_mean_grad(model)
        np.testing.assert_array_equal(model.params["a"].grad.get(), np.arange(1000))
    comm.finalize()


@pytest.mark.parametrize("dtype", ["i1", "u2", "f2", "f8", "c8", "?"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_staging(shape, dtype):
    array = cupy.asarray(np.arange(int(np.prod(shape))).reshape(shape).astype(dtype))
    host = placement.to_host(array.T)
    np.testing.assert_array_equal(host, array.get().T, strict=True)
    back = placement.deliver(host, True)
    assert isinstance(back, cupy.ndarray)
    np.testing.assert_array_equal(back.get(), host, strict=True)


def test_memory_that_is_pinned_where_it_is():
    array = np.zeros(1 << 20, "f4")
    address = array.ctypes.data
    staging.register(array, array)
    assert cupy.cuda.runtime.pointerGetAttributes(address).type == cupy.cuda.runtime.memoryTypeHost
    del array
    assert cupy.cuda.runtime.pointerGetAttributes(address).type == 0  # not registered


def test_arrays_that_overlap_in_pinned_memory():
    memory = np.zeros(1 << 20, np.uint8)
    small, large = memory[:400].view("f4"), memory.view("f4")
    staging.register(small, memory)
    staging.register(large, memory)
    cupy.arange(large.size, dtype="f4").get(out=large)
    np.testing.assert_array_equal(large, np.arange(large.size))
    address, of_memory = memory.ctypes.data, cupy.cuda.runtime.pointerGetAttributes
    del small
    assert of_memory(address).type == cupy.cuda.runtime.memoryTypeHost  # the other one still needs it
    del large
    assert of_memory(address).type == 0


def test_only_cupy_s_arrays_are_on_a_device():
    assert placement.is_device_array(cupy.asarray([1, 2]))
    assert not any(placement.is_device_array(x) for x in (np.zeros(1), None, [1], np.float32(1), "x"))


def test_nccl_of_one_rank():
    assert nccl.get_version() >= 23000
    nccl.require()
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    array = cupy.arange(10, dtype="f4")
    with nccl.group():
        communicator.all_reduce(array)
        communicator.broadcast(array, 0)
    communicator.all_gather(array)
    communicator.reduce(array, 0)
    np.testing.assert_array_equal(array.get(), np.arange(10))
    np.testing.assert_array_equal(communicator.reduce_scatter(array).get(), np.arange(10))
    with pytest.raises(ValueError, match=r"expected a C-contiguous array, got strides \(8,\) for shape \(5,\)"):
        communicator.all_reduce(array[::2])
    communicator.destroy()


def test_what_is_alive_at_the_end_is_aborted(trace):
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    communicator.all_reduce(cupy.arange(10, dtype="f4"))
    with trace as traced:
        nccl._abort_all()
        nccl._abort_all()
    assert traced.names("nccl") == ["abort"]
    assert communicator not in nccl._alive


def test_addresses_whose_upload_was_interrupted_are_uploaded_again():
    class Interrupted:
        def __getitem__(self, _):
            raise KeyboardInterrupt

    table = kernels.Table([0, 3], 5)
    first, second = ([cupy.full(n, value, "f4") for n in (3, 2)] for value in (1.0, 2.0))
    packed = cupy.zeros(5, "f4")
    kernels.pack(table, first, np.dtype("f4"), packed)
    table._device, kept = Interrupted(), table._device
    with pytest.raises(KeyboardInterrupt):
        kernels.pack(table, second, np.dtype("f4"), packed)
    table._device = kept
    kernels.pack(table, second, np.dtype("f4"), packed)
    np.testing.assert_array_equal(packed.get(), np.full(5, 2.0))
