"""The base class of iterators that wrap another iterator."""

from __future__ import annotations

from typing import Any, ClassVar

from chainer.dataset import Iterator


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

    def __del__(self) -> None:
        """Do nothing: the actual iterator finalizes itself when nothing uses it any more; the script still may."""

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:  # not set yet: while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.actual_iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.actual_iterator, name, value)


def set_option(iterator: Any, name: str, value: Any) -> None:
    """Set an option of one of Chainer's iterators after it was created."""
    # repeat may be a property without a setter.
    setattr(iterator, f"_{name}" if hasattr(iterator, f"_{name}") else name, value)
    # MultiprocessIterator has passed its original options to its prefetching thread.
    prefetch_loop = getattr(iterator, "_prefetch_loop", None)
    if prefetch_loop is not None:
        setattr(prefetch_loop, name, value)
