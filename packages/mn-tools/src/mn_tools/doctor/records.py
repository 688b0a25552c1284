"""How a process that the doctor starts reports to it: marked JSON objects, one a line."""

from __future__ import annotations

import json
import os

from mn_tools.doctor.commands import MARK

__all__ = ["emit", "in_short"]


def emit(*, to: int = 1, **record: object) -> None:
    """Write one record, in one piece, so that those of several ranks do not mix.

    Args:
        to: The file descriptor that it is written to.
        record: What is written.
    """
    os.write(to, f"{MARK}{json.dumps(record)}\n".encode())


def in_short(error: BaseException) -> str:
    """Return the type and the message of an exception."""
    return f"{type(error).__name__}: {error}"[:1000]
