"""PyYAML."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def restore_load(yaml: ModuleType) -> None:
    """Let ``yaml.load`` and ``yaml.load_all`` work without a Loader; they then build only plain data."""
    for name in ("load", "load_all"):
        setattr(yaml, name, _with_default(getattr(yaml, name), yaml.SafeLoader))


def _with_default(load: Callable[..., Any], default: type) -> Callable[..., Any]:
    @functools.wraps(load)
    def wrapper(stream: Any, Loader: type | None = None) -> Any:
        return load(stream, default if Loader is None else Loader)

    return wrapper
