"""Functions that others have asked to be called."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Callbacks:
    """Functions to be called on an event, in the order in which they were added.

    A ``weakref.WeakMethod`` is forgotten together with its object.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], Callable[..., object] | None]] = []  # references to them

    def add(self, callback: Callable[..., object]) -> None:
        """Add a function, or a weak reference to a method."""
        self._callbacks = [each for each in self._callbacks if each() is not None]
        self._callbacks.append(callback if isinstance(callback, weakref.WeakMethod) else lambda: callback)

    def __call__(self, *args: Any) -> None:
        """Call all functions with these arguments.

        Raises:
            Exception: The first exception of a function. The other functions are called nevertheless.
        """
        failures: list[Exception] = []
        for reference in self._callbacks:
            function = reference()
            try:
                if function is not None:
                    function(*args)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
