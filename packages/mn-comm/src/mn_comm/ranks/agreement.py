"""Checks whose result may differ between ranks: either all ranks raise, or none.

If only one rank raised, the others would wait forever in the next collective. So every check of a collective ends with
one reduction of one or two numbers; only if this shows a problem are messages exchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from mpi4py import MPI

_T = TypeVar("_T")
_FAILED = -1  # no digest is negative


class Group(Protocol):
    """Ranks that can find out whether they agree, by some methods of :class:`mn_comm.ranks.intracomm.Ranks`."""

    def any(self, flag: bool) -> bool: ...  # noqa: D102
    def differ(self, number: int) -> bool: ...  # noqa: D102
    def allgather(self, obj: Any) -> list[Any]: ...  # noqa: D102


class Communicating(Protocol):
    """A communicator of this package or of a script: anything that can gather objects."""

    def allgather_obj(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks; collective."""


class _ByMethods:
    """The ranks of a communicator of unknown type, used only through the methods that every communicator has."""

    def __init__(self, communicator: Communicating) -> None:
        self.allgather: Callable[[Any], list[Any]] = communicator.allgather_obj

    def any(self, flag: bool) -> bool:
        return any(self.allgather(flag))

    def differ(self, number: int) -> bool:
        return len(set(self.allgather(number))) > 1


def group_of(communicator: Communicating | MPI.Intracomm | Group) -> Group:
    """Return the ranks of any communicator (of this package, of a script, or of MPI) as a :class:`Group`."""
    found: Any = communicator
    # An attribute of the class: a mock object in place of a communicator has every attribute.
    if hasattr(type(found), "differ"):
        return found  # type: ignore[no-any-return]
    if hasattr(type(getattr(found, "ranks", None)), "differ"):
        return found.ranks  # type: ignore[no-any-return]
    if hasattr(found, "allgather_obj"):
        return _ByMethods(found)
    from mpi4py import MPI

    from mn_comm.ranks.intracomm import Ranks

    if not isinstance(found, MPI.Intracomm):  # of None, mpi4py would make MPI.COMM_NULL
        raise TypeError(f"expected a communicator, got {type(found).__name__}: {found!r:.80}")
    return Ranks(found)


def transact(communicator: Any, function: Callable[[], _T]) -> _T:
    """Return the result of a function that communicates, as one transaction with an elastic communicator; collective.

    Args:
        communicator: The communicator, or an object that acts as one.
        function: The function. It is called again, on all ranks, if a rank is lost during the call.

    Example:
        >>> mn_comm.transact(comm, lambda: comm.allgather_obj(comm.rank))
        [0, 1]
    """
    found: Any = communicator
    return found.transact(function) if is_elastic(found) else function()


def is_elastic(communicator: Any) -> bool:
    """Return whether a communicator, or an object that acts as one, continues without ranks that die; not collective.

    Example:
        >>> mn_comm.is_elastic(comm)
        False
    """
    # An attribute of the class: a mock object has every attribute.
    return getattr(type(communicator), "is_elastic", False) is True


def refuse_elastic(communicator: Any, what: str, why: str) -> None:
    """Raise ValueError, on every rank, if a communicator continues without ranks that die; not collective.

    The message says ``what`` cannot be used with such a communicator, and ``why`` not.
    """
    if is_elastic(communicator):
        raise ValueError(f"expected a communicator made with elastic=False for {what}, got an elastic one: {why}")


@contextmanager
def raise_on_all(communicator: Communicating | MPI.Intracomm | Group) -> Iterator[None]:
    """Run a block on every rank and raise on all of them if it raised on any; collective.

    The block must not communicate. A rank on which it failed raises its own exception. The others raise an exception of
    the same built-in type, or of its nearest built-in base class, which names the lowest rank that failed.

    Args:
        communicator: The communicator whose ranks run the block.

    Raises:
        Exception: What the block raised, here or on another rank.

    Example:
        >>> try:
        ...     with mn_comm.raise_on_all(comm):
        ...         if comm.rank == 1:
        ...             raise ValueError("no data here")
        ... except ValueError as error:
        ...     print("no data here" in str(error))
        True
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error

    def exchange() -> list[tuple[str, str] | None]:
        group = group_of(communicator)
        has_failed = group.any(mine is not None)
        return group.allgather(None if mine is None else describe(mine)) if has_failed else []

    reports = transact(communicator, exchange)
    if mine is not None:
        raise mine
    for rank, report in enumerate(reports):
        if report is not None:
            raise remote_error(rank, *report)


def warn(ranks: MPI.Intracomm, message: str) -> None:
    """Warn on rank 0, of the place that called the caller; where warnings are errors, raise on every rank; collective.

    Raises:
        Warning: The warning, on rank 0; on the others a ``RuntimeError`` with its text.
    """
    with raise_on_all(ranks):
        if ranks.rank == 0:
            warnings.warn(message, stacklevel=3)


def agree(group: Group, check: Callable[[], _T], explain: Callable[[Sequence[_T]], Exception]) -> _T:
    """Return what a function returns, or raise on every rank if it raised on one, or the ranks differ; collective.

    ``check`` checks arguments without communicating, and returns them: numbers, strings, and tuples of these. If they
    differ, ``explain`` creates the exception from those of all ranks.
    """
    mine: Exception | None = None
    try:
        value = check()
    except Exception as error:
        mine = error
    # One reduction for both, unless there is something to report.
    if group.differ(_FAILED if mine is not None else digest(value)) or mine is not None:
        with raise_on_all(group):
            if mine is not None:
                raise mine
        raise everywhere(explain(group.allgather(value)))
    return value


def difference_of(what: str, values: Sequence[Any]) -> ValueError:
    """Return the exception for ranks that have different values of something."""
    rank = first_other(values)
    return ValueError(
        f"expected the same {what} on every rank, got {values[0]} on rank 0 and {values[rank]} on rank {rank}"
    )


def first_other(values: Sequence[Any]) -> int:
    """Return the first rank whose value differs from that of rank 0, as :func:`digest` compares them."""
    return next(rank for rank, other in enumerate(values) if repr(other) != repr(values[0]))


def expect_same(communicator: Communicating | MPI.Intracomm | Group, what: str, value: Any) -> None:
    """Raise on every rank unless all ranks have equal values; collective.

    Args:
        communicator: The communicator whose ranks must agree.
        what: What the values are, for the message.
        value: This rank's: numbers, strings, and tuples and lists of these.

    Raises:
        ValueError: The ranks differ; the same message on all of them.

    Example:
        >>> mn_comm.expect_same(comm, "number of classes", 10)
    """
    transact(
        communicator, lambda: agree(group_of(communicator), lambda: value, lambda values: difference_of(what, values))
    )


def digest(signature: object) -> int:
    """Return 62 bits of the BLAKE2b hash (RFC 7693) of a signature: this number and its negative fit into an int64.

    A signature consists of tuples of strings and numbers, so that its ``repr`` describes it completely.
    """
    try:  # hashlib has the same function, but loads OpenSSL, which takes as long as loading all modules of these ranks
        from _blake2 import blake2b
    except ImportError:  # not CPython
        from hashlib import blake2b
    hashed = blake2b(repr(signature).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") >> 2


def everywhere(error: Exception) -> Exception:
    """Mark an exception that all ranks raise alike, so that, if none of them catches it, only rank 0 shows it."""
    error.raised_on_all_ranks = True  # type: ignore[attr-defined]
    return error


def describe(error: Exception) -> tuple[str, str]:
    """Describe an exception for other ranks: by its type, or its nearest built-in base class, and its text."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _BUILT_IN]
    return (kinds[0], str(error)) if kinds else (type(error).__name__, str(error))


def remote_error(rank: int, kind: str, message: str) -> Exception:
    """Return the exception to raise here for one that was raised on another rank.

    It has the same type if that is a common built-in one; otherwise it is a ``RuntimeError`` that names the type. Its
    attribute ``raised_on_rank`` is the rank.
    """
    text = message if kind in _BUILT_IN else f"{kind}: {message}"
    error = _BUILT_IN.get(kind, RuntimeError)(f"on rank {rank}: {text}")
    error.raised_on_rank = rank  # type: ignore[attr-defined]
    return error


_BUILT_IN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(TypeError, ValueError, RuntimeError, NotImplementedError, RecursionError, AssertionError, AttributeError),
        *(ImportError, ModuleNotFoundError, LookupError, IndexError, KeyError, MemoryError, EOFError),
        *(ArithmeticError, OverflowError, ZeroDivisionError, FloatingPointError),
        *(OSError, FileNotFoundError, FileExistsError, PermissionError, ConnectionError, TimeoutError),
    )
}
