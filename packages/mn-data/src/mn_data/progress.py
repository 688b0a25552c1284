"""A progress bar for what takes long, where somebody may be looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]

_PATIENCE = 2.0  # seconds before a bar appears


@contextmanager
def progress(is_wanted: bool, total: int | None, what: str) -> Iterator[Callable[[int], object]]:
    """Yield a function that is to be told how many bytes were moved.

    Args:
        is_wanted: Whether this rank is the one to show a bar; it does so on a terminal only, after two seconds.
        total: How many bytes will be moved, if that is known.
        what: What is done, to be shown before the bar.
    """
    if not (is_wanted and sys.stderr.isatty()):
        yield _ignore
        return
    from tqdm import tqdm  # type: ignore  # it has no types; not earlier: most never need it

    with tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=_PATIENCE, leave=False) as bar:
        yield bar.update


def _ignore(nbytes: int) -> None:
    pass
