"""Which package the name ``chainermn`` refers to: ours, or the old copy in Chainer's wheel."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec, PathFinder

VARIABLE = "CHAINERMN_IMPL"
# The distribution chainermn-meta keeps its package one level down, because Chainer's own wheel puts a folder
# of the same name next to it and two distributions must not write into one folder.
HOME = "chainermn_meta"


def find_chainermn() -> ModuleSpec | None:
    """Return the spec of our ``chainermn``, or None to leave the name to the next finder.

    Raises:
        ImportError: The environment asks for an implementation that is not installed or not known.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "ours", "bundled"):
        raise ImportError(f"expecting {VARIABLE} to be 'ours' or 'bundled', got {choice!r}", name="chainermn")
    if choice == "bundled":
        return None
    home = PathFinder.find_spec(HOME)
    locations = None if home is None else home.submodule_search_locations
    ours = PathFinder.find_spec("chainermn", locations) if locations else None
    if ours is not None and ours.has_location:  # a folder without __init__.py has none
        return ours
    if choice == "ours":
        raise ImportError(f"{VARIABLE} is 'ours', but chainermn-meta is not installed", name="chainermn")
    return None
