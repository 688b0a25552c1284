"""Packing in one kernel launch: every gradient is converted and written to its place in a buffer; and unpacking."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mn_comm.device import staging

_THREADS = 256
_PER_THREAD = 8  # elements; a multiple of those of one access
_PER_BLOCK = _THREADS * _PER_THREAD
_BYTES = 16  # that a thread reads or writes in one access, at most

_SOURCE = """\
{includes}
typedef {grad} grad_t;
typedef {wire} wire_t;
typedef {between} between_t;

template <typename T> struct alignas({width} * sizeof(T)) run_t {{ T at[{width}]; }};

// What is read and written in one access. The compiler splits other stores, and also those of a structure of float16.
template <int bytes> struct access {{}};
template <> struct access<4> {{ typedef int type; }};
template <> struct access<8> {{ typedef int2 type; }};
template <> struct access<16> {{ typedef int4 type; }};

template <bool reads, typename T> __device__ __forceinline__ void move_one(T* place, between_t& value) {{
    if (reads) value = (between_t)*place; else *place = (T)value;
}}

template <bool reads, typename T> __device__ __forceinline__ void move_run(T* place, between_t* value) {{
    typedef typename access<sizeof(run_t<T>)>::type access_t;
    run_t<T> run;
    access_t bits;
    if (reads) {{
        bits = *(const access_t*)place;
        memcpy(&run, &bits, sizeof(run));
    }}
    #pragma unroll
    for (int j = 0; j < {width}; ++j) if (reads) value[j] = (between_t)run.at[j]; else run.at[j] = (T)value[j];
    if (!reads) {{
        memcpy(&bits, &run, sizeof(run));
        __stcg((access_t*)place, bits);
    }}
}}

template <typename T> __device__ __forceinline__ bool is_aligned(const T* place) {{
    return (unsigned long long)place % sizeof(run_t<T>) == 0;
}}

// Moves the elements of gradients from i on. A missing gradient is read as zeros, and not written to.
template <bool reads> __device__ __forceinline__ void move_gradients(
    const long long* table, const long long* begin, int& member, long long i, long long length, between_t* value
) {{
    while (begin[member + 1] <= i) ++member;
    grad_t* grad = (grad_t*)table[member];
    grad_t* place = grad + (i - begin[member]);
    if (begin[member + 1] - i >= {width} && grad && is_aligned(place)) {{
        move_run<reads>(place, value);
        return;
    }}
    #pragma unroll
    for (int j = 0; j < {width}; ++j) if (i + j < length) {{
        while (begin[member + 1] <= i + j) ++member;
        grad = (grad_t*)table[member];
        if (grad) move_one<reads>(grad + (i + j - begin[member]), value[j]); else if (reads) value[j] = 0;
    }}
}}

template <bool reads> __device__ __forceinline__ void move_packed(
    wire_t* packed, long long i, long long length, between_t* value
) {{
    if (i + {width} <= length && is_aligned(packed + i)) {{
        move_run<reads>(packed + i, value);
        return;
    }}
    #pragma unroll
    for (int j = 0; j < {width}; ++j) if (i + j < length) move_one<reads>(packed + i + j, value[j]);
}}

// table: the address of each gradient, 0 for none; then where each begins; then the length of all; then, for each
// block, the gradient in which it begins.
// Every thread moves a few runs of neighboring elements, each in one access where it belongs to one gradient and is
// aligned. All are read before any is written, so that all reads are under way together.
extern "C" __global__ void {name}(const long long* table, int members, wire_t* packed) {{
    const long long* begin = table + members;
    const long long length = begin[members];
    const long long first = (long long)blockIdx.x * {per_block} + threadIdx.x * {width};
    int member = (int)begin[members + 1 + blockIdx.x];
    between_t value[{runs}][{width}];
    #pragma unroll
    for (int k = 0; k < {runs}; ++k) {{
        const long long i = first + k * {threads} * {width};
        if (i < length) {read};
    }}
    #pragma unroll
    for (int k = 0; k < {runs}; ++k) {{
        const long long i = first + k * {threads} * {width};
        if (i < length) {write};
    }}
}}
"""
_GRADIENTS = "move_gradients<{}>(table, begin, member, i, length, value[k])"
_PACKED = "move_packed<{}>(packed, i, length, value[k])"
_PACK = {"read": _GRADIENTS.format("true"), "write": _PACKED.format("false")}
_UNPACK = {"read": _PACKED.format("true"), "write": _GRADIENTS.format("false")}
_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}
_HEADERS = {"float16": "cuda_fp16.h", "bfloat16": "cuda_bf16.h"}


def source(name: str, grad: np.dtype[Any], wire: np.dtype[Any]) -> str:
    """Return the CUDA source of ``pack`` or ``unpack`` for gradients of one dtype that are sent in another."""
    width = _BYTES // max(grad.itemsize, wire.itemsize)
    headers = sorted({_HEADERS[dtype.name] for dtype in (grad, wire) if dtype.name in _HEADERS})
    return _SOURCE.format(
        name=name,
        includes="\n".join(f"#include <{header}>" for header in headers),
        grad=_TYPES[grad.name],
        wire=_TYPES[wire.name],
        between="double" if np.float64 in (grad, wire) else "float",
        threads=_THREADS,
        per_block=_PER_BLOCK,
        width=width,
        runs=_PER_THREAD // width,
        **(_PACK if name == "pack" else _UNPACK),
    )


@functools.cache
def _kernel(name: str, grad: np.dtype[Any], wire: np.dtype[Any]) -> Any:
    import cupy

    return cupy.RawKernel(source(name, grad, wire), name)


class Table:
    """The addresses of gradients, and their places in a buffer, for the kernel; uploaded if an address has changed.

    ``begins`` says where each gradient begins in the packed buffer, in elements, from 0, ascending; none is empty.
    """

    def __init__(self, begins: Sequence[int], length: int) -> None:
        import cupy

        self.members = len(begins)
        self.blocks = -(-length // _PER_BLOCK)
        shape = (2 * self.members + 1 + self.blocks,)
        firsts = np.searchsorted(begins, np.arange(self.blocks) * _PER_BLOCK, side="right") - 1
        self._host = staging.empty_pinned(shape, np.dtype(np.int64))
        self._host[self.members :] = [*begins, length, *firsts]
        self._device = cupy.empty(shape, np.int64)
        self._addresses: list[int] = []  # those on the device
        self._uploaded: Any = None

    def on_device(self, addresses: list[int]) -> Any:
        """Return the table on the device, with these addresses of the gradients."""
        import cupy

        if self._addresses != addresses:
            changed = self._host
            if self._uploaded is not None:
                self._uploaded.synchronize()  # the copy of the last step may not have started yet
                changed = self._host[: self.members]
            self._addresses = []
            changed[: self.members] = addresses
            self._device[: changed.size].set(changed)
            self._uploaded = cupy.cuda.get_current_stream().record()
            staging.keep_until(self._uploaded, self._host)  # this object may be gone earlier
            self._addresses = addresses
        return self._device


def pack(table: Table, gradients: Sequence[Any], dtype: np.dtype[Any], packed: Any) -> None:
    """Copy gradients into one buffer, converted, by one launch on the current stream.

    They are C-contiguous CuPy arrays of ``dtype``, or ``None`` for zeros, and the table is theirs. ``packed`` begins at
    the first of them.
    """
    _launch("pack", table, gradients, dtype, packed)


def unpack(table: Table, gradients: Sequence[Any], dtype: np.dtype[Any], packed: Any) -> None:
    """Copy a buffer to the gradients, converted, by one launch; as :func:`pack`, but ``None`` is not written to."""
    _launch("unpack", table, gradients, dtype, packed)


def _launch(name: str, table: Table, gradients: Sequence[Any], dtype: np.dtype[Any], packed: Any) -> None:
    addresses = [0 if gradient is None else gradient.data.ptr for gradient in gradients]
    arguments = (table.on_device(addresses), np.int32(table.members), packed)
    _kernel(name, dtype, packed.dtype)((table.blocks,), (_THREADS,), arguments)
