"""Which package the name ``chainermn`` refers to: ours, or the old copy in Chainer's wheel."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location

VARIABLE = "CHAINERMN_IMPL"
# The distribution chainermn-meta keeps its package one level down, because Chainer's own wheel puts a folder
# of the same name next to it and two distributions must not write into one folder.
HOME = "chainermn_meta"


def requested() -> str:
    """Return "", "ours" or "bundled", as the environment asks.

    Raises:
        ImportError: The variable has any other value.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "ours", "bundled"):
        raise ImportError(f"expecting {VARIABLE} to be 'ours' or 'bundled', got {value!r}", name="chainermn")
    return value


def our_init() -> str | None:
    """Return the path of our ``chainermn/__init__.py``, or None if it is not installed."""
    spec = PathFinder.find_spec(HOME)
    if spec is None:
        return None
    for directory in spec.submodule_search_locations or ():
        init = os.path.join(directory, "chainermn", "__init__.py")
        if os.path.isfile(init):
            return init
    return None


def find_chainermn() -> ModuleSpec | None:
    """Return the spec of our ``chainermn``, or None to leave the name to the next finder.

    Raises:
        ImportError: The environment asks for an implementation that is not installed or not known.
    """
    choice = requested()
    if choice == "bundled":
        return None
    init = our_init()
    if init is None:
        if choice == "ours":
            raise ImportError(f"{VARIABLE} is 'ours', but chainermn-meta is not installed", name="chainermn")
        return None
    return spec_from_file_location("chainermn", init, submodule_search_locations=[os.path.dirname(init)])
