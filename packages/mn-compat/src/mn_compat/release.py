"""Which Chainer is installed, read from its files without importing it."""

from __future__ import annotations

import contextlib
import os
from importlib.machinery import PathFinder
from typing import NamedTuple

# 7.8.1.post1 has the same code as 7.8.1.
SUPPORTED = ("7.8.1", "7.8.1.post1")


class Release(NamedTuple):
    """An installed Chainer.

    Attributes:
        directory: The folder of the package ``chainer``.
        version: The version in its ``_version.py``, or "unknown".
    """

    directory: str
    version: str

    @property
    def supported(self) -> bool:
        """Whether the substitutions were written for this release."""
        return self.version in SUPPORTED


def find_release() -> Release | None:
    """Return the Chainer that ``import chainer`` would load, or None if there is none."""
    spec = PathFinder.find_spec("chainer")
    if spec is None or not spec.has_location or not spec.submodule_search_locations:
        return None
    return release_in(next(iter(spec.submodule_search_locations)))


def release_in(directory: str) -> Release:
    """Return the Chainer in a folder; its version is read as text: importing ``importlib.metadata`` takes 20 ms."""
    with contextlib.suppress(OSError), open(os.path.join(directory, "_version.py"), encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition("=")
            if name.strip() == "__version__":
                return Release(directory, value.strip().strip("'\""))
    return Release(directory, "unknown")
