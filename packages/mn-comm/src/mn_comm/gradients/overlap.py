"""Which arrays share memory with others or with themselves, so that means cannot be written to all of them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mn_comm.basis.placement import is_device_array

# These are checked for thousands of arrays, so all flags are read at once, as bits of NumPy's C interface.
FLAGS = attrgetter("flags.num")
OWNS_MEMORY = 0x4


def are_contiguous_and_apart(arrays: Sequence[Any]) -> bool:
    """Return whether all arrays are on devices and C-contiguous, and share no memory: the usual case, seen fast.

    False is also returned if an empty array lies within another one.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or set(map(type, arrays)) != {cupy.ndarray}:
        return False
    if not all(array.flags.c_contiguous for array in arrays):
        return False
    # An address belongs to one device only.
    places = sorted((array.data.ptr, array.nbytes) for array in arrays)
    return all(low + nbytes <= high for (low, nbytes), (high, _) in itertools.pairwise(places))


def can_be_written_to(array: Any) -> bool:
    """Return whether an array may be written to, and no two of its elements have the same address."""
    if not is_device_array(array) and not array.flags.writeable:
        return False
    if not array.size:
        return True
    reach = array.itemsize  # if strides grow, no two elements overlap; ``np.broadcast_to`` makes strides of 0
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach += stride * (length - 1)
    return True


def overlapping(arrays: Sequence[Any]) -> list[int]:
    """Return the positions of arrays that share memory with an earlier one."""
    # Views of different arrays that own their memory do not overlap. Comparing addresses takes longer.
    owners = [array if (base := array.base) is None else base for array in arrays]
    are_arrays = set(map(type, owners)) <= {np.ndarray}
    if are_arrays and len(set(map(id, owners))) == len(owners):
        if all(num & OWNS_MEMORY for num in set(map(FLAGS, owners))):
            return []
    limits = [_limits(array) for array in arrays]
    found: list[int] = []
    kept: list[int] = []
    for i in sorted(range(len(arrays)), key=limits.__getitem__):
        kept = [k for k in kept if limits[k][1] > limits[i][0]]
        if arrays[i].size and any(_share_memory(arrays[k], arrays[i]) for k in kept):
            found.append(i)
        else:
            kept.append(i)
    return found


def _limits(array: Any) -> tuple[int, int]:
    """Return the lowest address of an array's elements, and the end of the highest."""
    low = array.data.ptr if is_device_array(array) else array.ctypes.data
    reaches = [stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True) if length]
    high = low + sum(reach for reach in reaches if reach > 0) + array.itemsize
    return low + sum(reach for reach in reaches if reach < 0), high


def _share_memory(one: Any, other: Any) -> bool:
    """Return whether two arrays may have elements with the same address; their ranges of addresses overlap."""
    if is_device_array(one) or is_device_array(other):
        return is_device_array(one) and is_device_array(other) and bool(one.device.id == other.device.id)
    try:
        return bool(np.shares_memory(one, other, max_work=1000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
