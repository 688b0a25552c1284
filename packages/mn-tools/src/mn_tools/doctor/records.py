"""How a process that the doctor starts reports to it: marked JSON objects, one per line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

from mn_tools.doctor.commands import MARK

__all__ = ["emit", "errors_as", "in_short"]


def emit(*, to: int = 1, **record: object) -> None:
    """Write one record in a single call, so that records of several ranks do not mix.

    Args:
        to: The file descriptor to write to.
        record: The content.
    """
    os.write(to, f"{MARK}{json.dumps(record)}\n".encode())


@contextlib.contextmanager
def errors_as(name: str) -> Iterator[None]:
    """Write a record of this name if the block raises, and continue after it."""
    try:
        yield
    except Exception as error:
        emit(to=1, **{name: in_short(error)})


def in_short(error: BaseException) -> str:
    """Return the type and message of an exception."""
    return f"{type(error).__name__}: {error}"[:1000]
