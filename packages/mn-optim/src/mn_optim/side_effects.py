"""What a pass through a model does besides computing: communicate, change persistent values, and report values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import chainer
import numpy as np

from mn_comm import CommunicatorBase


def communicating_links(model: chainer.Link) -> Iterator[tuple[str, chainer.Link]]:
    """Yield paths and links of a model that hold a communicator, such as multi-node batch normalisation."""
    for path, link in model.namedlinks():
        if any(isinstance(value, CommunicatorBase) for value in vars(link).values()):
            yield path, link


def persistents_of(links: Iterable[chainer.Link]) -> Iterator[tuple[chainer.Link, str, Any]]:
    """Yield each persistent value of some links, after its link and its name."""
    for link in links:
        for name in link._persistent:  # noqa: SLF001 - Chainer has no public name for it
            yield link, name, getattr(link, name)


def keep_persistents(links: Iterable[chainer.Link]) -> Callable[[], None]:
    """Copy the persistent values of some links; return what restores them, and may be called several times."""
    kept = [(link, name, copy_of(value)) for link, name, value in persistents_of(links)]

    def put_back() -> None:
        for link, name, value in kept:
            found = getattr(link, name)
            if isinstance(found, np.ndarray) and isinstance(value, np.ndarray) and found.shape == value.shape:
                found[...] = value  # the same array: other code may refer to it
            else:
                setattr(link, name, copy_of(value))

    return put_back


def copy_of(value: Any) -> Any:
    """Return a copy of an array; any other value as it is, unless it can be copied."""
    return value.copy() if hasattr(value, "copy") else value


@contextmanager
def observing() -> Iterator[dict[str, Any]]:
    """Yield a dictionary for the values that are reported in the context, if there is a reporter."""
    observation: dict[str, Any] = {}
    try:
        reporter = chainer.get_current_reporter()
    except IndexError:
        yield observation
        return
    with reporter.scope(observation):
        yield observation
