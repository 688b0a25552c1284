"""Step 2: do all ranks have the same arrays? Otherwise all raise, before anything is mixed up or hangs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm import agreement
from mn_comm.placement import is_device_array
from mn_comm.timeline import record

__all__ = ["ON_DEVICE", "Agreement", "Signature", "signature_of"]

Signature = tuple[tuple[Any, ...], ...]
"""Name, shape and dtype of each array, in order; both are ``None`` for an array that is missing, and ``ON_DEVICE``
follows for one on a device."""

ON_DEVICE = "on a device"


def signature_of(named_arrays: Iterable[tuple[str, Any]]) -> Signature:
    """Return the signature of names and arrays (or ``None``)."""
    plain = np.ndarray
    return tuple(
        [
            (name, array.shape, array.dtype) if type(array) is plain else _entry(name, array)
            for name, array in named_arrays
        ]
    )


def _entry(name: str, array: Any) -> tuple[Any, ...]:
    if array is None:
        return (name, None, None)
    return (name, array.shape, array.dtype, *([ON_DEVICE] if is_device_array(array) else []))


class Agreement:
    """The check that all ranks hold the same arrays, remembering the last one to be cheap when nothing changed.

    Args:
        mpi_comm: The communicator whose ranks must agree.
        operation: The name of the operation, for the message.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, operation: str) -> None:
        self._mpi_comm = mpi_comm
        self._operation = operation
        self._signature: Signature = ()
        self._digest = agreement.digest(())
        self._pending: agreement.Pending | None = None

    def start(self, signature: Signature) -> Signature:
        """Start the check, to do something else while it is under way; collective.

        Args:
            signature: This rank's.

        Returns:
            The signature; the same object for as long as it is equal to the one before, to be quickly compared.
        """
        if signature != self._signature:
            self._signature = signature
            self._digest = agreement.digest(signature)
        self._pending = agreement.Pending(self._mpi_comm, self._digest)
        return self._signature

    def finish(self) -> None:
        """Raise on every rank if the ranks' signatures differ; collective.

        Raises:
            ValueError: The ranks differ; the same message on all of them.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            finish = pending.finish if record.active is None else record.recorded("agree", pending.finish)
            finish(self._signature, self._explain)

    def _explain(self, signatures: Sequence[Signature]) -> ValueError:
        rank = next(rank for rank, other in enumerate(signatures) if other != signatures[0])
        expected, got = first_difference(signatures[0], signatures[rank])
        name = min(entry[0] for entry in (expected, got) if entry is not None)
        return ValueError(
            f"{self._operation}: expected the same parameters on every rank, but rank {rank} differs from rank 0, "
            f"first at {name}: {_describe(expected, name)} on rank 0, {_describe(got, name)} on rank {rank}"
        )


def first_difference(one: Signature, other: Signature) -> tuple[Any, Any]:
    """Return the entries, or ``None``, at the first place in which two different signatures differ."""
    return next((a, b) for a, b in zip_longest(one, other) if a != b)


def _describe(entry: tuple[Any, ...] | None, name: str) -> str:
    if entry is None or entry[0] != name:
        return "missing"
    _, shape, dtype, *place = entry
    return "not initialised" if shape is None else " ".join([f"shape {shape} and dtype {dtype}", *place])
