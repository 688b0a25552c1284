"""The base class of iterators that wrap another iterator."""

from __future__ import annotations

from typing import Any, ClassVar

from chainer.dataset import Iterator

__all__ = ["Wrapper"]


class Wrapper(Iterator):  # type: ignore[misc]  # Chainer has no types
    """An iterator that passes all other attributes on to ``actual_iterator``.

    Attributes:
        actual_iterator: The wrapped iterator.
    """

    _OWN: ClassVar[tuple[str, ...]] = ("actual_iterator",)

    actual_iterator: Any

    def finalize(self) -> None:
        """Finalize the actual iterator."""
        self.actual_iterator.finalize()

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:  # not set yet: while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.actual_iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.actual_iterator, name, value)
