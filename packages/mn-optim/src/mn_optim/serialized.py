"""Values in Chainer's serializers, which may be missing when a snapshot of plain Chainer is loaded."""

from __future__ import annotations

from typing import Any

__all__ = ["read", "write"]


def write(serializer: Any, key: str, value: Any) -> None:
    """Save a value."""
    serializer(key, value)


def read(serializer: Any, key: str) -> Any:
    """Return a value, as an array, or ``None`` if there is none."""
    try:
        return serializer(key, None)
    except (KeyError, ValueError):  # the latter is raised for an HDF5 file without the group
        return None
