"""One way to call functions that communicate, whether the communicator is elastic or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["is_elastic", "transact"]

_T = TypeVar("_T")


def transact(communicator: Any, function: Callable[[], _T]) -> _T:
    """Call a function that communicates, as one transaction if the communicator is elastic; collective.

    Args:
        communicator: The communicator, or an object that acts as one.
        function: The function. It is called again, on all ranks, if a rank is lost during the call.

    Returns:
        The function's result.

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
