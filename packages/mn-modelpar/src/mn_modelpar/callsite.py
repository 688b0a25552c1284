"""The place in the user's code that called a communication, for error messages."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import chainer

_OURS = os.path.dirname(__file__) + os.sep
_CHAINER = os.path.dirname(chainer.__file__) + os.sep

_behalf: ContextVar[tuple[int, str] | None] = ContextVar("_behalf", default=None)


class CallSite(NamedTuple):
    """A place in the user's code.

    Attributes:
        place: File and line.
        part: The part of a model that called the function, if it was not the user's code itself.
        key: Equal for two calls that come from the same part of a model.
    """

    place: str
    part: str
    key: tuple[object, ...]

    def warn(self, message: str) -> None:
        """Issue a ``RuntimeWarning`` at that place."""
        file, _, line = self.place.rpartition(":")
        warnings.warn_explicit(message, RuntimeWarning, file or self.place, int(line) if file else 1)

    def __str__(self) -> str:
        return f"{self.place}, for {self.part}" if self.part else self.place


@contextmanager
def on_behalf_of(owner: object, part: str) -> Iterator[None]:
    """Name the part of a model that the communications in this block belong to.

    Args:
        owner: The model.
        part: A description of the part, which is the same in every pass.
    """
    token = _behalf.set((id(owner), part))
    try:
        yield
    finally:
        _behalf.reset(token)


def call_site() -> CallSite:
    """Return the innermost place on the stack that is neither in this package nor in Chainer."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _CHAINER)):
        frame = frame.f_back
    place = "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    behalf = _behalf.get()
    # A part of a model is the same part no matter where the model is called from.
    return CallSite(place, behalf[1] if behalf else "", behalf or (place,))
