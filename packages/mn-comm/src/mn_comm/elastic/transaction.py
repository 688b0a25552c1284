"""One call for what communicates, be the communicator elastic or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from mn_comm.base import CommunicatorBase

__all__ = ["is_elastic", "transact"]

_T = TypeVar("_T")


def transact(communicator: CommunicatorBase | Any, function: Callable[[], _T]) -> _T:
    """Call what communicates, as one transaction where the communicator is elastic; collective.

    Args:
        communicator: The communicator, or what stands for one.
        function: Called again, on all ranks, if a rank was lost in it; else once.

    Returns:
        What it returned.

    Example:
        >>> mn_comm.transact(comm, lambda: comm.allgather_obj(comm.rank))
        [0, 1]
    """
    found: Any = communicator
    return found.transact(function) if is_elastic(found) else function()


def is_elastic(communicator: CommunicatorBase | Any) -> bool:
    """Return whether a communicator, or what stands for one, goes on without ranks that die; not collective.

    Example:
        >>> mn_comm.is_elastic(comm)
        False
    """
    # Of the class: a mock has every attribute.
    return getattr(type(communicator), "is_elastic", False) is True
