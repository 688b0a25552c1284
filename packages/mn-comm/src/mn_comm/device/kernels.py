"""Packing in one kernel launch: every gradient is converted and written to its place in a buffer; and unpacking."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mn_comm.device import staging

_THREADS = 256
_PER_THREAD = 8

_SOURCE = """\
{includes}
typedef {grad} grad_t;
typedef {wire} wire_t;
typedef {between} between_t;

// table: the address of each gradient, 0 for none; then where each begins; then the length of all.
// Every thread moves a few elements: those of its block are neighbors, and its reads are all under way together.
extern "C" __global__ void {name}(const long long* table, int members, {const}wire_t* packed) {{
    const long long* begin = table + members;
    const long long length = begin[members];
    const long long first = (long long)blockIdx.x * {threads} * {per_thread} + threadIdx.x;
    if (first >= length) return;
    int member = 0;
    for (int end = members; end - member > 1;) {{
        const int middle = member + (end - member) / 2;
        if (begin[middle] <= first) member = middle; else end = middle;
    }}
    between_t value[{per_thread}];
    grad_t* place[{per_thread}];
    #pragma unroll
    for (int k = 0; k < {per_thread}; ++k) {{
        const long long i = first + k * {threads};
        if (i < length) {{
            while (begin[member + 1] <= i) ++member;
            grad_t* grad = (grad_t*)table[member];
            place[k] = grad ? grad + (i - begin[member]) : 0;
            value[k] = {read};
        }}
    }}
    #pragma unroll
    for (int k = 0; k < {per_thread}; ++k) {{
        const long long i = first + k * {threads};
        if (i < length) {write};
    }}
}}
"""
_PACK = {"const": "", "read": "place[k] ? (between_t)*place[k] : (between_t)0", "write": "packed[i] = (wire_t)value[k]"}
_UNPACK = {"const": "const ", "read": "(between_t)packed[i]", "write": "if (place[k]) *place[k] = (grad_t)value[k]"}
_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}
_HEADERS = {"float16": "cuda_fp16.h", "bfloat16": "cuda_bf16.h"}


def source(name: str, grad: np.dtype[Any], wire: np.dtype[Any]) -> str:
    """Return the CUDA source of ``pack`` or ``unpack`` for gradients of one dtype that are sent in another."""
    headers = sorted({_HEADERS[dtype.name] for dtype in (grad, wire) if dtype.name in _HEADERS})
    return _SOURCE.format(
        name=name,
        includes="\n".join(f"#include <{header}>" for header in headers),
        grad=_TYPES[grad.name],
        wire=_TYPES[wire.name],
        between="double" if np.float64 in (grad, wire) else "float",
        threads=_THREADS,
        per_thread=_PER_THREAD,
        **(_PACK if name == "pack" else _UNPACK),
    )


@functools.cache
def _kernel(name: str, grad: np.dtype[Any], wire: np.dtype[Any]) -> Any:
    import cupy

    return cupy.RawKernel(source(name, grad, wire), name)


class Table:
    """The addresses of gradients and their targets, for the kernel; uploaded only if an address has changed.

    ``begins`` says where each gradient begins in the packed buffer, in elements, from 0, ascending; none is empty.
    """

    def __init__(self, begins: Sequence[int], length: int) -> None:
        import cupy

        self.members = len(begins)
        self.length = length
        shape = (2 * self.members + 1,)
        self._host = staging.empty_pinned(shape, np.dtype(np.int64))
        self._host[: self.members] = -1  # not an address
        self._host[self.members :] = [*begins, length]
        self._device = cupy.empty(shape, np.int64)
        self._uploaded: Any = None

    def on_device(self, addresses: Sequence[int]) -> Any:
        """Return the table on the device, with these addresses of the gradients."""
        import cupy

        if self._host[: self.members].tolist() != addresses:
            if self._uploaded is not None:
                self._uploaded.synchronize()  # the copy of the last step may not have started yet
            self._host[: self.members] = addresses
            self._device.set(self._host)
            self._uploaded = cupy.cuda.get_current_stream().record()
            staging.keep_until(self._uploaded, self._host)  # this object may be gone earlier
        return self._device


def pack(table: Table, gradients: Sequence[Any], dtype: np.dtype[Any], packed: Any) -> None:
    """Copy gradients into one buffer, converted, by one launch on the current stream.

    They are C-contiguous CuPy arrays of ``dtype``, or ``None`` for zeros. ``packed`` begins at the first of them.
    """
    _launch("pack", table, gradients, dtype, packed)


def unpack(table: Table, gradients: Sequence[Any], dtype: np.dtype[Any], packed: Any) -> None:
    """Copy a buffer to the gradients, converted, by one launch; as :func:`pack`, but ``None`` for none."""
    _launch("unpack", table, gradients, dtype, packed)


def _launch(name: str, table: Table, gradients: Sequence[Any], dtype: np.dtype[Any], packed: Any) -> None:
    addresses = [0 if gradient is None else gradient.data.ptr for gradient in gradients]
    blocks = -(-table.length // (_THREADS * _PER_THREAD))
    arguments = (table.on_device(addresses), np.int32(table.members), packed)
    _kernel(name, dtype, packed.dtype)((blocks,), (_THREADS,), arguments)
