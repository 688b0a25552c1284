"""Batch normalisation without moving averages."""

from __future__ import annotations

import chainer
from chainer.links import BatchNormalization

__all__ = ["keep_last_statistics"]


def keep_last_statistics(model: chainer.Link) -> int:
    """Have batch normalisations keep the statistics of the last mini-batch alone, instead of moving averages.

    With large batches a moving average lags behind what the parameters have become; the mean over ranks of the last
    mini-batches' statistics does not (Akiba, Suzuki and Fukuda 2017, arXiv 1711.04325). That mean is what
    ``chainermn.extensions.AllreducePersistent`` makes, before an evaluation::

        keep_last_statistics(model)
        trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))

    Args:
        model: The model.

    Returns:
        How many links it has found.
    """
    found = [link for link in model.links() if isinstance(link, BatchNormalization)]
    for link in found:
        link.decay = 0.0
    return len(found)
