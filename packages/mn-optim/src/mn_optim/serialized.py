"""Values in Chainer's serializers, which may be missing when a snapshot of plain Chainer is loaded."""

from __future__ import annotations

import itertools
from typing import Any

import chainer
import numpy as np

from mn_comm.building_blocks import GradientReducer


def read(serializer: Any, key: str) -> Any:
    """Return a value, as an array, or ``None`` if there is none."""
    try:
        return serializer(key, None)
    except (KeyError, ValueError):  # the latter is raised for an HDF5 file without the group
        return None


def serialize_compression(serializer: Any, reducer: GradientReducer) -> None:
    """Save or load the part that the compression of a reducer has not sent yet.

    Args:
        serializer: One of Chainer's, for the optimizer.
        reducer: The reducer.
    """
    if isinstance(serializer, chainer.Serializer):
        for name, array in reducer.state().items():
            serializer["compression"](name, array)
        return
    mine = serializer["compression"]
    # A deserializer cannot list its contents.
    names = itertools.chain(["header"], map(str, itertools.count()))
    found = itertools.takewhile(lambda each: each[1] is not None, ((name, read(mine, name)) for name in names))
    reducer.load_state({name: np.asarray(array) for name, array in found})
