"""The program that a supervisor starts for each rank: it connects to the keeper of its node, and then runs the script.

So the keeper notices that a rank dies while it still imports modules, or in ``MPI_Init``, where the other ranks would
wait for it forever. The supervisor starts it as ``python start.py ARGUMENTS…``; the process then becomes ``python
ARGUMENTS…``, and the connection stays open.
"""

from __future__ import annotations

import os
import sys

from mn_guard.supervised import link

__all__ = ["main"]

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Where launchers say which rank in ``MPI_COMM_WORLD`` a process will be."""


def main(arguments: list[str]) -> None:
    """Report that this rank begins, and run the script in its place.

    Args:
        arguments: The arguments of Python: the script and its own arguments.
    """
    found = link.supervision()
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name, "").isdecimal()), None)
    if found is not None and rank is not None:
        try:
            connected = link.connection()
            if connected is not None:
                connected.ask({"op": "start", "attempt": found.attempt, "rank": int(rank)})
                link.pass_on(connected)
        except OSError as error:
            raise SystemExit(f"[chainermn] rank {rank}: {error}: this rank ends") from None
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
