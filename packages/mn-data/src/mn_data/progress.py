"""A progress bar for the scattering of a large dataset, if the output is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]

_PATIENCE = 2.0  # seconds before a bar appears


@contextmanager
def progress(is_wanted: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the number of bytes that were moved.

    Args:
        is_wanted: Whether this rank shows the bar; it does so only on a terminal, and after two seconds.
    """
    if not (is_wanted and sys.stderr.isatty()):
        yield lambda nbytes: None
        return
    from tqdm import tqdm  # type: ignore  # it has no types; not earlier: most never need it

    with tqdm(desc="scattering the dataset", unit="B", unit_scale=True, delay=_PATIENCE, leave=False) as bar:
        yield bar.update
