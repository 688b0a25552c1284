"""Quantising on a device: one launch for all blocks, in which a warp takes one block.

A device is fast only if it reads and writes every element few times. With array operations, it would do so about thirty
times. If blocks are long, there are too few of them to keep the device busy, so 32 warps take one.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mn_compress.scales import ScaledBlocks

_Array = Any  # CuPy's
_THREADS = 256
_WARP = 32
_LONG = 4096  # a block of more elements is long
_MOST_THREADS = 1024

_SOURCE = r"""
// TEAM: how many threads take one block; 32, or all threads of one of CUDA's blocks.
#define MAGNITUDE 0x7fffffff
#define INFINITE 0x7f800000
#define NOT_A_NUMBER 0x7fc00000
#define MOST 0x7f7ffffe  // the largest number that is finite when it is divided by 127, rounded, and multiplied again
#define ALL_LANES 0xffffffff
#define ROUNDS 12582912.0f  // adding it rounds a small number to an integer

// The block of this team: its number, its first element, and how many elements it has; 0 if there is no such block.
// This is the same for all threads that wait for one another, so those without a block may return. The lane is the
// thread's number in the team, and that of its first element in the block.
struct block_t { long long number, begin; int length, lane; };

__device__ __forceinline__ block_t own_block(long long total, int block) {
    const long long number = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / TEAM, begin = number * block;
    const long long rest = total - begin;
    block_t own = {number, begin, rest <= 0 ? 0 : rest < block ? (int)rest : block, (int)threadIdx.x % TEAM};
    return own;
}

__device__ __forceinline__ int larger(int one, int other) { return one > other ? one : other; }
__device__ __forceinline__ float sum(float one, float other) { return one + other; }

template <typename T> __device__ __forceinline__ T combined_in_warp(T value, T (*combine)(T, T)) {
    for (int distance = 16; distance; distance /= 2)
        value = combine(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

// Combines the values of all threads of the team; each of them gets the result.
template <typename T> __device__ __forceinline__ T combined(T value, T (*combine)(T, T)) {
    value = combined_in_warp(value, combine);
#if TEAM > 32
    __shared__ T of_warp[TEAM / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = combined_in_warp(of_warp[threadIdx.x % 32], combine);
#endif
    return value;
}

// A number from 0 to below 1, for a position: an integer, hashed twice. It is a bijection of 32 bits with little bias,
// found by search: "lowbias32" of Chris Wellons' hash-prospector.
__device__ __forceinline__ float drawn(unsigned int position, unsigned int key, unsigned int other_key) {
    unsigned int bits = position;
    for (int i = 0; i < 2; ++i) {
        bits ^= i ? other_key : key;
        bits ^= bits >> 16;
        bits *= 0x7feb352du;
        bits ^= bits >> 15;
        bits *= 0x846ca68bu;
        bits ^= bits >> 16;
    }
    return (bits >> 8) * (1.0f / (1 << 24));
}

extern "C" __global__ void int8_encode(
    float* values, float* scales, signed char* codes, long long total, int block,
    int is_random, unsigned int key, unsigned int other_key
) {
    const block_t own = own_block(total, block);
    if (!own.length) return;
    float* value = values + own.begin;
    signed char* code = codes + own.begin;
    int greatest = 0;  // as integers, magnitudes have the same order, and NaN is the largest
    for (int i = own.lane; i < own.length; i += TEAM) greatest = larger(greatest, __float_as_int(value[i]) & MAGNITUDE);
    greatest = combined(greatest, larger);
    const bool all_finite = greatest < INFINITE;
    const bool is_usable = all_finite && __int_as_float(greatest) >= 127 * 1.17549435e-38f;
    const float unit = is_usable ? __int_as_float(greatest < MOST ? greatest : MOST) / 127 : 0;
    const float inverse = is_usable ? 1 / unit : 0;
    for (int i = own.lane; i < own.length; i += TEAM) {
        const float original = value[i];
        const int bits = __float_as_int(original), magnitude = bits & MAGNITUDE;
        float scaled = magnitude < INFINITE ? original : 0;
        const float error = all_finite ? scaled : 0;
        scaled *= inverse;
        if (is_random) {
            scaled = floorf(scaled + drawn((unsigned int)(own.begin + i), key, other_key));
            scaled = scaled > 127 ? 127 : scaled < -127 ? -127 : scaled;
        } else {
            scaled += ROUNDS;
            scaled -= ROUNDS;
        }
        value[i] = error - scaled * unit;
        code[i] = magnitude < INFINITE ? (signed char)(int)scaled : magnitude > INFINITE ? -128 : bits < 0 ? -1 : 1;
    }
    if (!own.lane) scales[own.number] = all_finite ? unit : __int_as_float(INFINITE);
}

extern "C" __global__ void int8_decode(
    float* values, const float* scales, const signed char* codes, long long total, int block
) {
    const block_t own = own_block(total, block);
    if (!own.length) return;
    const float scale = scales[own.number];
    for (int i = own.lane; i < own.length; i += TEAM) {
        const int code = codes[own.begin + i];
        // A zero stays a zero also in a block with an infinity.
        values[own.begin + i] = code == -128 ? __int_as_float(NOT_A_NUMBER) : code ? code * scale : 0;
    }
}

extern "C" __global__ void one_bit_encode(
    float* values, float* scales, unsigned char* codes, long long total, int block
) {
    const block_t own = own_block(total, block);
    if (!own.length) return;
    float* value = values + own.begin;
    unsigned char* code = codes + own.begin / 8;
    float total_magnitude = 0;
    for (int i = own.lane; i < own.length; i += TEAM) total_magnitude += fabsf(value[i]);
    const float mean = combined(total_magnitude, sum) / own.length;
    const bool is_finite = (__float_as_int(mean) & MAGNITUDE) < INFINITE;
    for (int first = 0; first < own.length; first += TEAM) {
        const int i = first + own.lane;
        const float original = i < own.length ? value[i] : 0;
        const int is_negative = __float_as_int(original) < 0;  // also -0.0
        const unsigned int signs = __ballot_sync(ALL_LANES, is_negative);
        if (i >= own.length) continue;
        // An error that is not finite would stay forever.
        value[i] = is_finite ? original - (is_negative ? -mean : mean) : 0;
        if (own.lane % 8) continue;
        unsigned int eight = 0;  // the first sign in the highest bit
        for (int j = 0; j < 8; ++j) eight = eight << 1 | (signs >> (own.lane % 32 + j) & 1);
        code[i / 8] = eight;
    }
    if (!own.lane) scales[own.number] = mean;
}

extern "C" __global__ void one_bit_decode(
    float* values, const float* scales, const unsigned char* codes, long long total, int block
) {
    const block_t own = own_block(total, block);
    if (!own.length) return;
    const float mean = scales[own.number];
    for (int i = own.lane; i < own.length; i += TEAM) {
        const bool is_negative = codes[(own.begin + i) / 8] >> (7 - i % 8) & 1;
        values[own.begin + i] = is_negative ? -mean : mean;
    }
}
"""


class Int8Kernels(ScaledBlocks):
    """Quantises like :class:`mn_compress.int8.Int8Codec`, to the same bits, but subnormal numbers count as zero.

    The numbers for stochastic rounding are others: hashes of the elements' positions and of two drawn keys. CuPy's
    generators have a state on the device, which would have to be set in every step.

    Args:
        block: How many elements share a scale.
    """

    bits = 8

    def encode(self, values: _Array, message: _Array, random: np.random.Generator | None) -> None:
        """Write a message, and leave in ``values`` the part that it omits."""
        keys = np.zeros(2, np.uint32) if random is None else random.integers(1 << 32, size=2, dtype=np.uint32)
        _launch("int8_encode", self, values, message, np.int32(random is not None), *keys)

    def decode(self, message: _Array, values: _Array) -> None:
        """Overwrite ``values`` with the content of a message."""
        _launch("int8_decode", self, values, message)


class OneBitKernels(ScaledBlocks):
    """Quantises like :class:`mn_compress.one_bit.OneBitCodec`.

    The device adds up the means of blocks in its own order. The means are sent, so all ranks have the same ones.

    Args:
        block: How many elements share a scale; a multiple of 8.
    """

    bits = 1

    def encode(self, values: _Array, message: _Array, random: np.random.Generator | None) -> None:
        """Write a message, and leave in ``values`` the part that it omits."""
        _launch("one_bit_encode", self, values, message)

    def decode(self, message: _Array, values: _Array) -> None:
        """Overwrite ``values`` with the content of a message."""
        _launch("one_bit_decode", self, values, message)


@functools.cache
def _kernel(name: str, team: int) -> Any:
    import cupy

    # The host does not contract multiplications and additions either.
    return cupy.RawKernel(_SOURCE, name, options=(f"-DTEAM={team}", "--fmad=false"))


def _launch(name: str, layout: ScaledBlocks, values: _Array, message: _Array, *others: np.generic) -> None:
    """Launch a kernel on the current stream."""
    scales, codes = layout.split(message, values.size)
    team, threads = (_WARP, _THREADS) if layout.block <= _LONG else (_MOST_THREADS, _MOST_THREADS)
    arguments = (values, scales, codes, np.int64(values.size), np.int32(layout.block), *others)
    _kernel(name, team)((-(-scales.size * team // threads),), (threads,), arguments)
