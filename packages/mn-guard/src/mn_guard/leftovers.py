"""Messages that have not been received when the program ends, because a send had no matching recv.

They are reported and received: if a message is left in ``MPI_COMM_WORLD``, ``MPI_Finalize`` of MPICH 5.0 fails, and its
launcher, which regards this as a crash, kills the ranks that are still running, often with status 0.
"""

from __future__ import annotations

import collections
import contextlib
import functools

import numpy as np
from mpi4py import MPI

from mn_guard.abort import say
from mn_guard.exit_sequence import Step, at_exit
from mn_guard.forks import warn_of_children_that_end

_MOST_NAMED = 3


@functools.cache
def receive_leftovers_at_exit() -> None:
    """At the end of the program, receive and report messages on ``MPI_COMM_WORLD`` that were never received."""
    if MPI.COMM_WORLD.size > 1:
        at_exit(Step.LEFTOVERS, _receive)
        warn_of_children_that_end(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}")


def _receive() -> None:
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    world, status = MPI.COMM_WORLD, MPI.Status()
    found: collections.Counter[tuple[int, int]] = collections.Counter()
    with contextlib.suppress(MPI.Exception):  # a rank has died
        while (message := world.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            found[status.source, status.tag] += 1
            message.Recv([np.empty(status.Get_count(MPI.BYTE), np.uint8), MPI.BYTE])
    if found:
        names = [f"{count} from rank {source} with tag {tag}" for (source, tag), count in found.items()]
        names[_MOST_NAMED:] = ["others"] if len(names) > _MOST_NAMED else []
        say(
            f"[chainermn] rank {world.rank} of {world.size} has ended without having received all messages: "
            f"{', '.join(names)}; each send needs a recv\n"
        )
