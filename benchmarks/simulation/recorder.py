"""A recorder of the calls of MPI that mn_comm makes: their kind, their ranks, and their bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from mpi4py import MPI

from mn_comm.building_blocks import Ranks
from simulation.messages import Call

__all__ = ["record"]

# The position of the array among the arguments; None if there is no array.
_COLLECTIVES = {
    **dict.fromkeys(("Allreduce", "Iallreduce", "Allgather", "Allgatherv", "Alltoallv", "Reduce_scatter"), 1),
    **dict.fromkeys(("Reduce_scatter_block", "Reduce"), 1),
    **dict.fromkeys(("Bcast",), 0),
    **dict.fromkeys(("Barrier", "bcast", "gather", "allgather", "scatter", "alltoall"), None),
}
_MESSAGES = ("Isend", "Send")


@contextmanager
def record() -> Iterator[list[Call]]:
    """Record, within the block, the calls of this process, in their order; not collective.

    Yields:
        The list to which the calls are added.
    """
    found: list[Call] = []
    names = (*_COLLECTIVES, *_MESSAGES)
    with patch.multiple(Ranks, **{name: _recording(name, getattr(Ranks, name), found) for name in names}):
        yield found


def _recording(name: str, original: Callable[..., Any], found: list[Call]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Ranks, *args: Any, **kwargs: Any) -> Any:
        if name in _MESSAGES:
            found.append(Call(name, (_in_world(self)[args[1]],), args[0].nbytes))
        else:
            place = _COLLECTIVES[name]
            found.append(Call(name, _in_world(self), 0 if place is None else _nbytes(args[place])))
        return original(self, *args, **kwargs)

    return call


def _nbytes(data: Any) -> int:
    return int((data[0] if isinstance(data, (list, tuple)) else data).nbytes)


def _in_world(ranks: MPI.Intracomm) -> tuple[int, ...]:
    """Return the numbers of a communicator's ranks among all ranks."""
    group, world = ranks.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple(MPI.Group.Translate_ranks(group, None, world))
    finally:
        group.Free()
        world.Free()
