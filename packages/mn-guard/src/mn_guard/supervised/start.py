"""The program that a supervisor starts for each rank: it connects to the keeper of its node, and then runs the script.

So the keeper notices that a rank dies while it still imports modules, or in ``MPI_Init``, where the other ranks would
wait for it forever. The supervisor starts it as ``python start.py ARGUMENTS…``; the process then becomes ``python
ARGUMENTS…``, and the connection stays open.
"""

from __future__ import annotations

import os
import sys

from mn_guard.job import RANKS
from mn_guard.supervised import link


def main(arguments: list[str]) -> None:
    """Report that this rank begins, and run the script in its place.

    Args:
        arguments: The arguments of Python: the script and its own arguments.
    """
    rank = next((os.environ[name] for name in RANKS if os.environ.get(name, "").isdecimal()), None)
    if rank is not None:
        try:
            connected = _report(int(rank))
            if connected is not None:
                connected.pass_on()
        except OSError as error:
            raise SystemExit(f"[chainermn] rank {rank}: {error}: this rank ends") from None
    os.execv(sys.executable, [sys.executable, *arguments])


def _report(rank: int) -> link.Connection | None:
    """Report to the keeper; return the connection to it, ``None`` if there is no keeper."""
    try:
        return link.tell(op="start", rank=rank)
    except ConnectionError:  # that of the previous attempt, which was about to end
        link.connection.cache_clear()
        return link.tell(op="start", rank=rank)


if __name__ == "__main__":
    main(sys.argv[1:])
