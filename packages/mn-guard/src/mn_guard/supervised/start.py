"""The program that a supervisor starts for each rank: it connects to the keeper of its node, and then runs the script.

So the keeper notices that a rank dies while it still imports modules, or in ``MPI_Init``, where the other ranks would
wait for it forever. The supervisor starts it as ``python start.py ARGUMENTS…``; the process then becomes ``python
ARGUMENTS…``, and the connection stays open.
"""

from __future__ import annotations

import os
import sys

from mn_guard.job import RANKS
from mn_guard.node import Connection
from mn_guard.supervised import link

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Report that this rank begins, and run the script in its place.

    Args:
        arguments: The arguments of Python: the script and its own arguments.
    """
    found = link.supervision()
    rank = next((os.environ[name] for name in RANKS if os.environ.get(name, "").isdecimal()), None)
    if found is not None and rank is not None:
        try:
            connected = _reported(op="start", attempt=found.attempt, rank=int(rank))
            if connected is not None:
                link.pass_on(connected)
        except OSError as error:
            raise SystemExit(f"[chainermn] rank {rank}: {error}: this rank ends") from None
    os.execv(sys.executable, [sys.executable, *arguments])


def _reported(**message: object) -> Connection | None:
    """Return the connection to the keeper, to which this rank has reported; ``None`` if there is no keeper."""
    connected = link.connection()
    try:
        if connected is not None:
            connected.ask(message)
    except ConnectionError:  # that of the previous attempt, which was about to end
        link.connection.cache_clear()
        connected = link.connection()
        if connected is not None:
            connected.ask(message)
    return connected


if __name__ == "__main__":
    main(sys.argv[1:])
