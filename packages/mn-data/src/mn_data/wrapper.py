"""What an iterator that stands for another one has in common with others of its kind."""

from __future__ import annotations

from typing import Any, ClassVar

from chainer.dataset import Iterator

__all__ = ["Wrapper"]


class Wrapper(Iterator):  # type: ignore[misc]  # Chainer has no types
    """An iterator all of whose attributes, but its own, are those of ``actual_iterator``.

    Attributes:
        actual_iterator: The iterator that it stands for.
    """

    _OWN: ClassVar[tuple[str, ...]] = ("actual_iterator",)

    actual_iterator: Any

    def next(self) -> Any:
        """Return the next batch."""
        return self.__next__()

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
