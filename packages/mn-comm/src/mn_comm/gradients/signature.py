"""What ranks compare before they average: a description of their arrays; and how a difference is explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from mn_comm.basis.placement import is_device_array
from mn_comm.ranks.agreement import everywhere, first_other, remote_error

Entry = tuple[Any, ...]
"""Name, shape and dtype of an array; both are ``None`` for one that is missing, and ``ON_DEVICE`` follows for one on a
device. More strings may follow, which must be the same, too. For a setting its name and value; for an exception that
was raised instead, ``FAILURE``, its type and its text."""
Signature = tuple[Entry, ...]

ON_DEVICE = "on a device"
FAILURE = "failure"
OWNERS = "owners of means"


def signature_of(named_arrays: Iterable[tuple[str, Any]]) -> Signature:
    """Return the signature of names and arrays (or ``None``)."""
    plain = np.ndarray
    return tuple([(name, a.shape, a.dtype) if type(a) is plain else _entry(name, a) for name, a in named_arrays])


def _entry(name: str, array: Any) -> Entry:
    if array is None:
        return (name, None, None)
    return (name, array.shape, array.dtype, *([ON_DEVICE] if is_device_array(array) else []))


def explain(found: Sequence[tuple[str, Signature]]) -> Exception:
    """Return the exception for ranks that differ in their operations or signatures."""
    operations, signatures = zip(*found, strict=True)
    for rank, signature in enumerate(signatures):
        if signature and signature[0][0] == FAILURE:
            return remote_error(rank, *signature[0][1:])
    if len(set(operations)) > 1:
        return everywhere(_different_operations(operations, signatures))
    return everywhere(_difference(operations[0], signatures))


def _different_operations(operations: Sequence[str], signatures: Sequence[Signature]) -> ValueError:
    rank = first_other(operations)
    here, there = ({name for name, *_ in signatures[i] if str(name).startswith("/")} for i in (0, rank))
    # If a parameter was added on one rank, that rank distributes its parameters, while the others average gradients.
    names = sorted(here ^ there) if here and there else []
    only = f": only rank {0 if names[0] in here else rank} has the parameter {names[0]}" if names else ""
    return ValueError(
        f"expected all ranks in the same operation, got {operations[0]} on rank 0 and {operations[rank]} on rank "
        f"{rank}{only}"
    )


def _difference(operation: str, signatures: Sequence[Signature]) -> ValueError:
    rank = first_other(signatures)
    expected, got = first_difference(signatures[0], signatures[rank])
    if expected is not None and got is not None and len(expected) == len(got) == 2:
        name, value = got
        if name == OWNERS:
            notes = [each and each[1] for each in (expected[1], value)]
            return ValueError(
                f"{operation}: expected the same owners of means on every rank, got {notes[0] or 'none'} on rank 0 and "
                f"{notes[1] or 'none'} on rank {rank}: the optimizer, its hooks and debug mode must be the same"
            )
        return ValueError(
            f"{operation}: expected the same {name} on every rank, got {expected[1]} on rank 0 and {value} on rank "
            f"{rank}: set_config must be called on every rank alike"
        )
    name = min(entry[0] for entry in (expected, got) if entry is not None)
    return ValueError(
        f"{operation}: expected the same parameters on every rank, but rank {rank} differs from rank 0, "
        f"first at {name}: {_describe(expected, name)} on rank 0, {_describe(got, name)} on rank {rank}"
    )


def first_difference(one: Signature, other: Signature) -> tuple[Any, Any]:
    """Return the entries, or ``None``, at the first position in which two different signatures differ."""
    return next((a, b) for a, b in zip_longest(one, other) if repr(a) != repr(b))


def _describe(entry: Entry | None, name: str) -> str:
    if entry is None or entry[0] != name:
        return "missing"
    _, shape, dtype, *place = entry
    return "not initialised" if shape is None else " ".join([f"shape {shape} and dtype {dtype}", *place])
