"""The kernels, without a device: run thread by thread as compiled C++ code. `-s kernels` compiles them by NVRTC."""

import ctypes
import itertools
import shutil
import subprocess

import numpy as np
import pytest

from mn_comm.device.kernels import source

HARNESS = """
#include <cstring>
struct alignas(8) int2 {{ int x, y; }};
struct alignas(16) int4 {{ int x, y, z, w; }};
template <typename T> void __stcg(T* place, T value) {{ *place = value; }}
#define __device__
#define __forceinline__ inline
struct Index {{ int x; }};
static Index blockIdx, threadIdx;
#define __global__
{source}
extern "C" void launch(int blocks, int threads, const long long* table, int members, wire_t* packed) {{
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {name}(table, members, packed);
}}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return a function that compiles the kernel for the processor."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")

    def compiled(name, grad, wire):
        library = folder / f"{name}-{grad}-{wire}.so"
        if not library.exists():
            code = HARNESS.format(name=name, source=source(name, np.dtype(grad), np.dtype(wire)))
            options = ["-x", "c++", "-", "-shared", "-fPIC", "-O1", "-Wno-unknown-pragmas", "-o", str(library)]
            subprocess.run([compiler, *options], input=code, text=True, check=True)
        return ctypes.CDLL(str(library)).launch

    return compiled


@pytest.mark.parametrize(("grad", "wire"), list(itertools.product(["f4", "f8"], repeat=2)))
@pytest.mark.parametrize("sizes", [[1], [5000], [3, 1, 2048, 1, 1, 4097, 7], [1] * 3000, [2047, 1, 2049], [256] * 17])
def test_every_element_goes_to_its_place_and_back(compiled, grad, wire, sizes):
    random = np.random.RandomState(0)
    grads = [random.uniform(-1, 1, size).astype(grad) for size in sizes]
    missing = len(sizes) // 2 if len(sizes) > 1 else None
    begins = np.cumsum([0, *sizes])
    packed = np.full(begins[-1] + 3, 7, wire)  # nothing may be written after the end
    blocks = -(-int(begins[-1]) // 2048)

    def launch(name, arrays):
        addresses = [0 if i == missing else each.ctypes.data for i, each in enumerate(arrays)]
        firsts = np.searchsorted(begins[:-1], np.arange(blocks) * 2048, side="right") - 1
        table = np.array([*addresses, *begins, *firsts], np.int64)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (table, packed)]
        compiled(name, grad, wire)(blocks, 256, pointers[0], len(sizes), pointers[1])

    launch("pack", grads)
    kept = [np.zeros_like(each) if i == missing else each for i, each in enumerate(grads)]
    np.testing.assert_array_equal(packed[:-3], np.concatenate(kept).astype(wire))
    np.testing.assert_array_equal(packed[-3:], np.full(3, 7, wire))
    back = [np.full_like(each, 5) for each in grads]
    packed[:-3] += 1
    launch("unpack", back)
    for i, (each, other) in enumerate(zip(back, kept, strict=True)):
        expected = np.full_like(each, 5) if i == missing else (other.astype(wire) + wire_one(wire)).astype(grad)
        np.testing.assert_array_equal(each, expected)


def wire_one(wire):
    return np.dtype(wire).type(1)
