"""For how long this package waits on purpose, in seconds; ``CHAINERMN_PATIENCE`` multiplies all of it.

Times that are part of a protocol between processes are in :mod:`mn_guard.node_process`. How long a rank may wait for
others is ``CHAINERMN_STALL_SECONDS``.
"""

from __future__ import annotations

import os

from mn_guard.job import as_number


def factor() -> float:
    """Return what ``CHAINERMN_PATIENCE`` says.

    Raises:
        ValueError: It is not a number above 0.
    """
    text = os.environ.get("CHAINERMN_PATIENCE", "1")
    number = as_number(text)
    if not 0 < number < float("inf"):
        raise ValueError(f"expected a number above 0 in CHAINERMN_PATIENCE, got {text!r}")
    return number


_FACTOR = factor()

EXIT = 1.0 * _FACTOR
"""Before an exit status ends all ranks: for others that also end, and are writing their messages."""
RIGHT_RANK = 2.0 * _FACTOR
"""Before a rank ends the job because of an exception that another rank should show."""
UNREAD_OUTPUT = 2.0 * _FACTOR
"""Before a rank ends the job: until the launcher has read its output."""
CTRL_C = 2.5 * _FACTOR
"""After Ctrl-C, until the job ends if rank 0 stays where it waits."""
OTHERS_AFTER_CTRL_C = 3.5 * _FACTOR
"""After Ctrl-C, before other ranks end the job: rank 0 may be saving its state."""
FAREWELL = 1.0 * _FACTOR
"""At the end of a program, for messages of the neighbors' stall monitors."""
