"""Checks whose outcome may differ between ranks: all ranks raise, or none does.

A rank that raises alone leaves the others waiting in the next collective for ever. So every check of a
collective ends in one reduction of three integers; only when that shows trouble are messages exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

__all__ = ["Pending", "agree", "digest", "expect_same", "remote_error", "together"]


@contextmanager
def together(mpi_comm: MPI.Intracomm) -> Iterator[None]:
    """Run a block on every rank and raise on all of them if it raised on any; collective.

    The block must not communicate. A rank on which it failed raises its own exception; the others raise one
    of the same built-in type (``RuntimeError`` for any other) that names the lowest failing rank.

    Args:
        mpi_comm: The communicator whose ranks run the block.

    Raises:
        Exception: What the block raised, here or on another rank.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    if _any(mpi_comm, mine is not None):
        _raise_first(mpi_comm, mine)


def digest(signature: object) -> int:
    """Reduce a signature to a number that is equal wherever the signature is.

    Args:
        signature: Anything whose ``repr`` describes it completely: tuples of strings and numbers.

    Returns:
        62 bits of its BLAKE2b hash (RFC 7693), so that it and its negative fit into an int64.
    """
    from hashlib import blake2b  # not earlier: it brings OpenSSL, which takes as long to load as all of this package

    hashed = blake2b(repr(signature).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") >> 2


class Pending:
    """A reduction under way that shows whether all ranks hold the same signature.

    Args:
        mpi_comm: The communicator whose ranks must agree; starting is collective.
        number: The digest of this rank's signature.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, number: int) -> None:
        self._mpi_comm = mpi_comm
        self._extremes = np.array([number, -number], dtype=np.int64)
        self._request = mpi_comm.Iallreduce(MPI.IN_PLACE, self._extremes, op=MPI.MAX)

    def finish(self, signature: Any, explain: Callable[[Sequence[Any]], Exception]) -> None:
        """Raise on every rank unless all ranks hold the same signature; collective.

        Args:
            signature: This rank's; exchanged only if the ranks differ.
            explain: Makes the exception from the signatures of all ranks, the same one on every rank.

        Raises:
            Exception: What ``explain`` returned, if the ranks differ.
        """
        self._request.Wait()
        if self._extremes[0] != -self._extremes[1]:
            raise explain(self._mpi_comm.allgather(signature))


def agree(mpi_comm: MPI.Intracomm, signature: Any, explain: Callable[[Sequence[Any]], Exception]) -> None:
    """Raise on every rank unless all ranks hold the same signature, as :class:`Pending`, at once; collective."""
    Pending(mpi_comm, digest(signature)).finish(signature, explain)


def expect_same(mpi_comm: MPI.Intracomm, what: str, value: Any) -> None:
    """Raise on every rank unless all ranks have equal values; collective.

    Args:
        mpi_comm: The communicator whose ranks must agree.
        what: What the values are, for the message.
        value: This rank's: numbers, strings, and tuples and lists of these.

    Raises:
        ValueError: The ranks differ; the same message on all of them.
    """

    def explain(values: Sequence[Any]) -> ValueError:
        rank, other = next((rank, other) for rank, other in enumerate(values) if other != values[0])
        return ValueError(
            f"expected the same {what} on every rank, got {values[0]} on rank 0 and {other} on rank {rank}"
        )

    agree(mpi_comm, value, explain)


def remote_error(rank: int, kind: str, message: str) -> Exception:
    """Return the exception to raise here for one that was raised on another rank.

    Args:
        rank: The rank on which it was raised.
        kind: The name of its type.
        message: Its text.

    Returns:
        An exception of the same type where that is a common built-in one, else a ``RuntimeError`` that names
        it. Its attribute ``raised_on_rank`` is the rank.
    """
    error = (
        _BUILT_IN[kind](f"on rank {rank}: {message}")
        if kind in _BUILT_IN
        else RuntimeError(f"on rank {rank}: {kind}: {message}")
    )
    error.raised_on_rank = rank  # type: ignore[attr-defined]
    return error


_BUILT_IN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (TypeError, ValueError, RuntimeError, NotImplementedError, OverflowError, MemoryError, OSError)
}


def _any(mpi_comm: MPI.Intracomm, flag: bool) -> bool:
    found = np.array([flag], dtype=np.int32)
    mpi_comm.Allreduce(MPI.IN_PLACE, found, op=MPI.MAX)
    return bool(found[0])


def _raise_first(mpi_comm: MPI.Intracomm, mine: Exception | None) -> None:
    reports = mpi_comm.allgather(None if mine is None else (type(mine).__name__, str(mine)))
    if mine is not None:
        raise mine
    rank, (kind, message) = next((rank, report) for rank, report in enumerate(reports) if report is not None)
    raise remote_error(rank, kind, message)
