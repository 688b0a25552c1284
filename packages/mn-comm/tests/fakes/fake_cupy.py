"""A stand-in for CuPy whose device memory is NumPy's: exactly the part of CuPy that mn_comm uses.

It refuses what CuPy refuses: an array is not converted to a NumPy array implicitly, an operation cannot have operands
of both kinds, copies between them need equal shapes and dtypes, and pinned memory is not zeroed. The kernel is
imitated, with the addresses that it gets.
"""

import ctypes
import re
import threading
import types

import numpy as np

int64, uint8 = np.int64, np.uint8
DEVICES = 4
calls = []  # the names of the operations that the driver would have received, in order
log = []  # for each also the thread, and the stream that was current
launches = []  # the same for arithmetic, and whether it was on the current device
syncs = []  # the names of the operations that would have made the host wait for the device


def _call(name):
    calls.append(name)
    log.append((name, threading.current_thread().name, get_current_stream()))


class _Current(threading.local):
    device = 0
    stream = None


_current = _Current()


class Device:
    def __init__(self, device=None):
        self.id = _current.device if device is None else device
        assert 0 <= self.id < DEVICES
        self._outer = []

    @property
    def pci_bus_id(self):
        return f"0000:{self.id:02x}:00.0"

    def use(self):
        _current.device = self.id

    def synchronize(self):
        _call("Device.synchronize")

    def __enter__(self):
        self._outer.append(_current.device)
        _current.device = self.id
        return self

    def __exit__(self, *error):
        _current.device = self._outer.pop()


class Event:
    done = True  # launched operations complete immediately

    def synchronize(self):
        _call("Event.synchronize")


class Stream:
    def __init__(self, null=False, non_blocking=False):
        self.ptr = 0 if null else id(self)
        self._outer = []

    def record(self):
        return Event()

    def wait_event(self, event):
        assert isinstance(event, Event)
        _call("wait_event")

    def synchronize(self):
        _call("Stream.synchronize")

    def __enter__(self):
        self._outer.append(_current.stream)
        _current.stream = self
        return self

    def __exit__(self, *error):
        _current.stream = self._outer.pop()


_null = Stream(null=True)


def get_current_stream():
    return _current.stream or _null


class Memory:
    """A number of bytes: new ones, or those at an address, which belong to other code."""

    def __init__(self, size, ptr=None):
        self.bytes = np.empty(size, uint8) if ptr is None else _at(ptr, size)


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.bytes = mem, mem.bytes[offset:]
        self.ptr = self.bytes.ctypes.data

    def __add__(self, offset):
        return MemoryPointer(self, offset)

    def copy_from_device(self, source, size):
        _call("copy_from_device")
        assert len(self.bytes) >= size
        self.bytes[:size] = _at(source.ptr, size)

    def copy_from_device_async(self, source, size, stream):
        assert isinstance(stream, Stream)
        self.copy_from_device(source, size)


def _at(address, size):
    return np.frombuffer((ctypes.c_char * size).from_address(address), uint8)


class ndarray:
    def __init__(self, memory, device=None, memptr=None):
        if memptr is not None:  # the arguments are shape, dtype and memory
            shape, dtype, device = memory, np.dtype(device), None
            count = int(np.prod(shape))
            memory = memptr.bytes[: count * dtype.itemsize].view(dtype).reshape(shape)
        self._memory = memory
        self.base = None
        self.device = device or Device()

    def __getattr__(self, name):
        if name in ("shape", "dtype", "size", "ndim", "nbytes", "itemsize", "strides", "flags"):
            return getattr(self._memory, name)
        raise AttributeError(name)

    @property
    def data(self):
        owner = self._memory if self._memory.base is None else self._memory.base
        pointer = MemoryPointer(Memory(self._memory.nbytes, self._memory.ctypes.data), 0)
        pointer.mem = owner
        return pointer

    @property
    def __cuda_array_interface__(self):
        return self._memory.__array_interface__ | {"version": 3}

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __len__(self):
        return len(self._memory)

    def __getitem__(self, key):
        if isinstance(key, ndarray):
            if key.dtype == bool:
                syncs.append("mask")
            return _launch(lambda memory, key: memory[key], self, key)
        return ndarray(self._memory[key][...], self.device)

    def __setitem__(self, key, value):
        assert type(value) is not np.ndarray or not value.ndim, "an array in host memory is not assigned from"
        key, value = (each._memory if isinstance(each, ndarray) else each for each in (key, value))
        self._memory[key] = value

    def get(self, out=None):
        _call("get")
        if out is None:
            return self._memory.copy()
        assert (out.shape, out.dtype) == (self.shape, self.dtype)
        out[...] = self._memory
        return out

    def set(self, array):
        _call("set")
        assert type(array) is np.ndarray
        assert (array.shape, array.dtype) == (self.shape, self.dtype)
        assert self.flags.c_contiguous or self.flags.f_contiguous
        self._memory[...] = array

    __array_ufunc__ = None  # a NumPy array is not accepted as an operand

    def __bool__(self):
        return bool(_to_host(self))

    def __float__(self):
        return float(_to_host(self))

    def __int__(self):
        return int(_to_host(self))

    @property
    def T(self):
        return ndarray(self._memory.T, self.device)

    def all(self):
        return _launch(np.all, self)

    def max(self, axis=None):
        return _launch(np.max, self, axis=axis)

    def sum(self, axis=None):
        return _launch(np.sum, self, axis=axis)

    def copy(self):
        return ndarray(self._memory.copy(), self.device)

    def astype(self, dtype, order="K", copy=True):
        return (
            self if self.dtype == dtype and not copy else ndarray(self._memory.astype(dtype, order=order), self.device)
        )

    def reshape(self, *shape):
        return ndarray(self._memory.reshape(*shape), self.device)

    def view(self, dtype):
        return ndarray(self._memory.view(dtype), self.device)


def _to_host(array):
    assert array.size == 1
    syncs.append("scalar")
    return array._memory.reshape(())[()]


def _launch(function, *args, **kwargs):
    """Do what a NumPy function does, on arrays on one device and numbers."""
    arrays = [each for each in (*args, *kwargs.values()) if isinstance(each, ndarray)]
    for each in (*args, *kwargs.values()):
        assert type(each) is not np.ndarray, "an array in host memory is no operand"
    device = arrays[0].device.id if arrays else _current.device
    assert all(array.device.id == device for array in arrays), "expected arrays on one device"
    where = (threading.current_thread().name, get_current_stream(), device == _current.device)
    launches.append((getattr(function, "__name__", "?"), *where))
    args = [each._memory if isinstance(each, ndarray) else each for each in args]
    plain = {name: each._memory if isinstance(each, ndarray) else each for name, each in kwargs.items()}
    result = function(*args, **plain)
    return kwargs["out"] if isinstance(kwargs.get("out"), ndarray) else ndarray(np.asarray(result))


def _operator(function, is_reflected=False, is_in_place=False):
    def operate(self, other):
        operands = (other, self) if is_reflected else (self, other)
        return _launch(function, *operands, **({"out": self} if is_in_place else {}))

    return operate


for _name, _function in {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "and": np.bitwise_and},
    **{"or": np.bitwise_or, "xor": np.bitwise_xor, "lshift": np.left_shift, "rshift": np.right_shift},
}.items():
    setattr(ndarray, f"__{_name}__", _operator(_function))
    setattr(ndarray, f"__r{_name}__", _operator(_function, is_reflected=True))
    setattr(ndarray, f"__i{_name}__", _operator(_function, is_in_place=True))
for _name, _function in {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}.items():
    setattr(ndarray, f"__{_name}__", _operator(_function))
ndarray.__eq__, ndarray.__ne__ = _operator(np.equal), _operator(np.not_equal)
ndarray.__invert__ = lambda self: _launch(np.invert, self)


def _function(name, function=None):
    def call(*args, **kwargs):
        return _launch(function or getattr(np, name), *args, **kwargs)

    call.__name__ = name
    return call


for _name in (
    *("abs", "add", "clip", "cumsum", "empty_like", "floor", "isfinite", "less", "logical_not", "matmul", "multiply"),
    *("packbits", "partition", "searchsorted", "subtract", "unpackbits", "vdot", "where", "zeros_like", "arange"),
):
    globals()[_name] = _function(_name)
linalg = types.SimpleNamespace(qr=lambda array: tuple(map(ndarray, np.linalg.qr(array._memory))))


def flatnonzero(array):
    syncs.append("flatnonzero")
    return _launch(np.flatnonzero, array)


def empty(shape, dtype=float):
    memory = np.empty(shape, dtype)
    memory.reshape(-1).view(np.uint8)[...] = 0xAB
    return ndarray(memory)


def zeros(shape, dtype=float):
    return ndarray(np.zeros(shape, dtype))


def asarray(array):
    return array if isinstance(array, ndarray) else ndarray(np.array(array, order="K"))


def ascontiguousarray(array):
    return (
        array if array.flags.c_contiguous and array.ndim else ndarray(np.ascontiguousarray(array._memory), array.device)
    )


class RawKernel:
    """Does the work of the kernels ``pack`` and ``unpack``, as their comment describes the table."""

    names = types.MappingProxyType({"float": "f4", "double": "f8", "__half": "f2", "__nv_bfloat16": "bfloat16"})

    def __init__(self, source, name):
        assert f" {name}(" in source
        self.name = name
        self.grad, self.wire, self.between = (
            np.dtype(self.names[re.search(rf"typedef (\S+) {which};", source)[1]])
            for which in ("grad_t", "wire_t", "between_t")
        )

    def __call__(self, grid, block, arguments):
        _call(self.name)
        table, members, packed = arguments
        assert [type(a) for a in arguments] == [ndarray, np.int32, ndarray]
        assert (table.dtype, packed.dtype) == (np.int64, self.wire)
        assert table.device.id == packed.device.id == _current.device
        addresses, begins = np.split(table._memory, [members])
        assert (np.diff(begins) > 0).all()
        assert (grid[0] - 1) * block[0] * 8 < begins[-1] <= grid[0] * block[0] * 8
        for address, begin, end in zip(addresses, begins[:-1], begins[1:], strict=True):
            part = packed._memory[begin:end]
            if not address:
                if self.name == "pack":
                    part[...] = 0
                continue
            nbytes = int(end - begin) * self.grad.itemsize
            grad = np.frombuffer((ctypes.c_char * nbytes).from_address(int(address)), self.grad)
            if self.name == "pack":
                part[...] = grad.astype(self.between)
            else:
                grad[...] = part.astype(self.between)


class CUDARuntimeError(RuntimeError):
    pass


registered = {}


def _register(address, nbytes, flags):
    if any(address < begin + size and begin < address + nbytes for begin, size in registered.items()):
        raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered")
    registered[address] = nbytes


class Pinned(bytearray):
    @property
    def ptr(self):
        return np.frombuffer(self, uint8).ctypes.data


def _pinned(nbytes):
    assert nbytes > 0
    return Pinned(b"\xcd" * nbytes)


cuda = types.SimpleNamespace(
    Device=Device,
    Stream=Stream,
    alloc=lambda size: MemoryPointer(Memory(size), 0),
    alloc_pinned_memory=_pinned,
    MemoryPointer=MemoryPointer,
    UnownedMemory=lambda ptr, size, owner: Memory(size, ptr),
    get_current_stream=get_current_stream,
    runtime=types.SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError, hostRegister=_register, hostUnregister=registered.pop
    ),
)
