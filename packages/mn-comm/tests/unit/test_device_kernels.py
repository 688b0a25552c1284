"""The kernel, without a device: compiled for one by NVRTC, and run as a C++ compiler makes it, thread by thread."""

import ctypes
import itertools
import shutil
import subprocess

import numpy as np
import pytest

from mn_comm.device.kernels import source

FLOATS = ["f2", "bfloat16", "f4", "f8"]
HARNESS = """
struct Index {{ int x; }};
static Index blockIdx, threadIdx;
#define __global__
{source}
extern "C" void launch(int blocks, int threads, const long long* table, int members, wire_t* packed, double divisor) {{
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) pack(table, members, packed, divisor);
}}
"""


def dtype_of(name):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


@pytest.mark.parametrize(("grad", "wire"), list(itertools.product(FLOATS, FLOATS)))
def test_it_compiles_for_a_device(grad, wire):
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="needs CuPy, for NVRTC", exc_type=ImportError)
    pathfinder = pytest.importorskip("cuda.pathfinder", exc_type=ImportError)
    headers = pathfinder.find_nvidia_header_directory("cudart")
    program = nvrtc.createProgram(source(dtype_of(grad), dtype_of(wire)), "pack.cu", [], [])
    nvrtc.compileProgram(program, ["-arch=sm_80", f"-I{headers}"])
    assert len(nvrtc.getCUBIN(program)) > 1000


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return a function that compiles the kernel for the processor."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")

    def compiled(grad, wire):
        library = folder / f"{grad}-{wire}.so"
        if not library.exists():
            code = HARNESS.format(source=source(np.dtype(grad), np.dtype(wire)))
            options = ["-x", "c++", "-", "-shared", "-fPIC", "-O1", "-Wno-unknown-pragmas", "-o", str(library)]
            subprocess.run([compiler, *options], input=code, text=True, check=True)
        return ctypes.CDLL(str(library)).launch

    return compiled


@pytest.mark.parametrize(("grad", "wire"), list(itertools.product(["f4", "f8"], repeat=2)))
@pytest.mark.parametrize("sizes", [[1], [5000], [3, 1, 2048, 1, 1, 4097, 7], [1] * 3000, [2047, 1, 2049], [256] * 17])
def test_every_element_goes_to_its_place(compiled, grad, wire, sizes):
    random = np.random.RandomState(0)
    grads = [random.uniform(-1, 1, size).astype(grad) for size in sizes]
    missing = len(sizes) // 2 if len(sizes) > 1 else None
    begins = np.cumsum([0, *sizes])
    addresses = [0 if i == missing else each.ctypes.data for i, each in enumerate(grads)]
    table = np.array([*addresses, *begins], np.int64)
    packed = np.full(begins[-1] + 3, 7, wire)  # nothing may be written behind the end
    blocks = -(-int(begins[-1]) // 2048)
    launch = compiled(grad, wire)
    launch(
        blocks,
        256,
        table.ctypes.data_as(ctypes.c_void_p),
        len(sizes),
        packed.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_double(3),
    )
    kept = [np.zeros_like(each) if i == missing else each for i, each in enumerate(grads)]
    wide = np.result_type(grad, wire)
    np.testing.assert_array_equal(packed[:-3], (np.concatenate(kept).astype(wide) / wide.type(3)).astype(wire))
    np.testing.assert_array_equal(packed[-3:], np.full(3, 7, wire))
