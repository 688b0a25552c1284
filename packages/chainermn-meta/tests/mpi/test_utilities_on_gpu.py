"""Names in private modules of ChainerMN 7 that scripts' own communicators use for memory on devices."""

import chainermn  # noqa: F401 - before its parts
import numpy as np
import pytest
from chainermn import nccl
from chainermn.communicators import _communication_utility, _memory_utility
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from mpi4py import MPI
from on_gpu import SHARING, is_emulated

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.sizes(1, 4), pytest.mark.usefixtures("devices")]

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


class Parameter:
    def __init__(self, data, grad):
        self.data, self.grad = data, grad


class Model:
    def __init__(self, **params):
        self.params = params

    def namedparams(self):
        return self.params.items()


def on_device(*values, dtype="f4"):
    return cupy.asarray(np.array(values, dtype))


def test_memory_on_a_device():
    memory = _memory_utility.DeviceMemory()
    assert memory.size == 0
    memory.assign(32)
    memory.assign(16)  # it does not shrink
    assert memory.size == 32
    source, target = on_device(1, 2, 3), on_device(0, 0, 0)
    memory.from_device(source, 12, 4)
    memory.to_device(target, 8, 8, cupy.cuda.Stream())
    assert target.get().tolist() == [2, 3, 0]
    assert memory.array(3, 4).get().tolist() == [1, 2, 3]
    assert memory.array((3, 1), 4, np.int32).shape == (3, 1)
    if is_emulated():  # a CUDA-aware MPI library reads it
        cupy.cuda.Device().synchronize()
        assert np.frombuffer(memory.buffer(16), "f4")[1:].tolist() == [1, 2, 3]
    assert memory.ptr() == memory.array(1).data.ptr
    with pytest.raises(TypeError, match="expected a dtype, got None"):
        memory.array(1, dtype=None)


def test_pinned_memory():
    memory = _memory_utility.HostPinnedMemory()
    memory.assign(16)
    memory.array(2, 8)[:] = 1, 2
    assert np.frombuffer(memory.buffer(16), "f4")[2:].tolist() == [1, 2]
    assert memory.ptr(8).value == memory.ptr().value + 8


@pytest.mark.parametrize("zero_fill", [False, True])
@pytest.mark.parametrize("wire", ["f4", "f8"])
def test_gradients_there_and_back(zero_fill, wire):
    model = Model(
        c=Parameter(on_device(1, 2), on_device(3, 4)),
        a=Parameter(on_device(5), None),
        b=Parameter(None, None),
        d=Parameter(on_device(6, dtype="f8"), on_device(7, dtype="f8")),
    )
    assert [p.data.get()[0] for p in _memory_utility.extract_params_set_data(model)] == [5, 1, 6]
    params = _memory_utility.extract_params_set_grad(model, zero_fill)
    assert params == [model.params[name] for name in ("acd" if zero_fill else "cd")]
    count = _memory_utility.count_grad_elements(params, zero_fill)
    assert count == (4 if zero_fill else 3)
    buffer = _memory_utility.DeviceMemory()
    buffer.assign(count * np.dtype(wire).itemsize)
    _memory_utility.pack_params(params, "grad", buffer, np.dtype(wire), zero_fill, cupy.cuda.Stream())
    packed = buffer.array(count, dtype=wire)
    assert packed.get().tolist() == ([0, 3, 4, 7] if zero_fill else [3, 4, 7])
    packed[...] = cupy.asarray(np.arange(count) + 10)
    held = model.params["c"].grad
    _memory_utility.unpack_params(params, "grad", buffer, np.dtype(wire), zero_fill)
    assert np.concatenate([param.grad.get() for param in params]).tolist() == list(range(10, 10 + count))
    assert model.params["c"].grad is held
    assert model.params["d"].grad.dtype == "f8"


def test_what_mpi_is_given():
    array = np.arange(6, dtype="f4").reshape(2, 3).T
    assert _memory_utility.array_to_buffer_object(array).flags.c_contiguous
    assert _memory_utility.get_device_memory_pointer(array).flags.c_contiguous
    memory, datatype = _memory_utility.array_to_buffer_object(on_device(1, 2))
    assert datatype == MPI.FLOAT
    if is_emulated():
        cupy.cuda.Device().synchronize()
        assert np.frombuffer(memory, "f4").tolist() == [1, 2]
    assert _memory_utility.array_to_buffer_object(on_device(1), MPI.DOUBLE)[1] == MPI.DOUBLE


class Fork(MpiCommunicatorBase):
    """Averages by NCCL in its own memory, as public forks of ``pure_nccl`` do."""

    def __init__(self, mpi_comm):
        super().__init__(mpi_comm)
        self.nccl_comm = None
        self.sent, self.received = _memory_utility.DeviceMemory(), _memory_utility.DeviceMemory()
        with self.config_scope():
            self.allreduce_grad_dtype = None

    def finalize(self):
        super().finalize()
        if self.nccl_comm is not None:
            self.nccl_comm.destroy()
            self.nccl_comm = None

    def set_config(self, name, value=True, **kwargs):
        if name == "allreduce_grad_dtype":
            with self.config_scope():
                self.allreduce_grad_dtype = np.dtype(value)
        else:
            super().set_config(name, value, **kwargs)

    def multi_node_mean_grad(self, model, zero_fill=False):
        if self.nccl_comm is None:
            self.nccl_comm = _communication_utility.init_nccl_comm(self.mpi_comm)
        params = _memory_utility.extract_params_set_grad(model, zero_fill)
        count = _memory_utility.count_grad_elements(params, zero_fill)
        dtype = self.allreduce_grad_dtype or np.dtype("f4")
        for buffer in (self.sent, self.received):
            buffer.assign(count * dtype.itemsize)
        _memory_utility.pack_params(params, "grad", self.sent, dtype, zero_fill)
        number = _communication_utility._get_nccl_type_id(dtype)
        self.nccl_comm.allReduce(self.sent.ptr(), self.received.ptr(), count, number, nccl.NCCL_SUM, 0)
        mean = self.received.array(count, dtype=dtype)
        mean /= self.size
        _memory_utility.unpack_params(params, "grad", self.received, dtype, zero_fill)


def test_a_fork_that_averages_by_nccl(devices):
    if devices < SIZE and not SHARING:
        pytest.skip("ranks share a GPU and NCCL_MULTI_RANK_GPU_ENABLE is not set")
    comm = Fork(COMM.Dup())
    comm.set_config("allreduce_grad_dtype", np.float64)
    comm.set_config("batched_copy", False)
    half = comm.split(RANK % 2, RANK)
    assert (half.get_config("allreduce_grad_dtype"), half.get_config("batched_copy")) == (np.float64, False)
    for each in (comm, half):
        model = Model(w=Parameter(on_device(0, 0), on_device(RANK, 1)), b=Parameter(None, None))
        each.multi_node_mean_grad(model)
        ranks = range(SIZE) if each is comm else range(RANK % 2, SIZE, 2)
        assert model.params["w"].grad.get().tolist() == [np.mean(ranks), 1]
        each.finalize()
