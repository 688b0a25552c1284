"""Batch normalisation without moving averages."""

from __future__ import annotations

import chainer
from chainer.links import BatchNormalization


def keep_last_statistics(model: chainer.Link) -> int:
    """Make batch normalisations keep the statistics of the last mini-batch instead of moving averages.

    With large batches, a moving average lags behind the current parameters; the mean over ranks of the statistics of
    the last mini-batch does not (Akiba, Suzuki and Fukuda 2017, arXiv 1711.04325).
    ``chainermn.extensions.AllreducePersistent`` computes this mean before an evaluation::

        keep_last_statistics(model)
        trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))

    Args:
        model: The model.

    Returns:
        The number of links that were changed.
    """
    found = [link for link in model.links() if isinstance(link, BatchNormalization)]
    for link in found:
        link.decay = 0.0
    return len(found)
