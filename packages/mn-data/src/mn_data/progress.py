"""A progress bar for long operations, if the output is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]

_PATIENCE = 2.0  # seconds before a bar appears


@contextmanager
def progress(is_wanted: bool, total: int | None, what: str) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the number of bytes that were moved.

    Args:
        is_wanted: Whether this rank shows the bar; it does so only on a terminal, and after two seconds.
        total: How many bytes will be moved, if that is known.
        what: A description of the operation, shown before the bar.
    """
    if not (is_wanted and sys.stderr.isatty()):
        yield _ignore
        return
    from tqdm import tqdm  # type: ignore  # it has no types; not earlier: most never need it

    with tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=_PATIENCE, leave=False) as bar:
        yield bar.update


def _ignore(nbytes: int) -> None:
    pass
