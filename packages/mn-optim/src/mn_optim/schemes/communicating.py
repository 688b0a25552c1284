"""Links that communicate with other ranks while a model computes."""

from __future__ import annotations

from collections.abc import Iterator

import chainer

from mn_comm import CommunicatorBase

__all__ = ["communicating_links"]


def communicating_links(model: chainer.Link) -> Iterator[tuple[str, chainer.Link]]:
    """Yield paths and links of a model that hold a communicator, such as multi-node batch normalisation."""
    for path, link in model.namedlinks():
        if any(isinstance(value, CommunicatorBase) for value in vars(link).values()):
            yield path, link
