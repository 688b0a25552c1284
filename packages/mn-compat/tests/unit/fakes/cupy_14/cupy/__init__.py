import types

from cupy import cuda

__version__ = "14.2.0"


class ndarray:
    def __init__(self, shape, dtype=None):
        self.shape = shape
        self.dtype = dtype
        self.device = cuda.Device(cuda.current_device())


added = []
add = types.SimpleNamespace(at=lambda array, slices, value: added.append((array, slices, value)))


def zeros(shape, dtype=None):
    return ndarray(shape, dtype)


def empty_like(array):
    return ndarray(array.shape, array.dtype)


def copyto(out, array):
    out.copied_from = array


def get_default_memory_pool():
    return None


get_default_pinned_memory_pool = get_default_memory_pool


def memoize(for_each_device=False):
    return lambda function: function


def fuse(*args, **kwargs):
    return args[0] if args else lambda function: function


class ElementwiseKernel:
    def __init__(self, *args, **kwargs):
        self.preamble = kwargs.get("preamble", "")


ReductionKernel = RawKernel = ElementwiseKernel


def get_array_module(*args):
    import sys

    return sys.modules[__name__]
