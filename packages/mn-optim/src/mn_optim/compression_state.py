"""The state of compression (the part that has not been sent yet) in an optimizer's snapshot."""

from __future__ import annotations

import itertools
from typing import Any

import chainer
import numpy as np

from mn_comm.building_blocks import GradientReducer

__all__ = ["COMPRESSION", "serialize_compression"]

COMPRESSION = "compression"
"""The name of the part."""


def serialize_compression(serializer: Any, reducer: GradientReducer) -> None:
    """Save or load the state of a reducer.

    Args:
        serializer: One of Chainer's, for the optimizer.
        reducer: The reducer.
    """
    if isinstance(serializer, chainer.Serializer):
        for name, array in reducer.state().items():
            serializer[COMPRESSION](name, array)
        return
    state: dict[str, np.ndarray[Any, Any]] = {}
    # A deserializer cannot list its contents.
    for name in itertools.chain(["header"], map(str, itertools.count())):
        found = _read(serializer, name)
        if found is None:
            break
        state[name] = found
    reducer.load_state(state)


def _read(serializer: Any, name: str) -> np.ndarray[Any, Any] | None:
    try:
        found = serializer[COMPRESSION](name, None)
    except (KeyError, ValueError):  # a snapshot of an optimizer without compression, or before its first step
        return None
    return None if found is None else np.asarray(found)
