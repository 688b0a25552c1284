"""Iterators that continue with a dataset of another length."""

from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from chainer.iterators import MultithreadIterator, SerialIterator
from chainer.serializers import npz

import mn_extensions  # noqa: F401 - before Chainer
from mn_extensions.snapshot import fit_iterators


def make(kind, length, shuffle):
    """Return an object with an updater, like a trainer, and its iterator."""
    iterator = kind(np.arange(length), 2, shuffle=shuffle)
    optimizer = chainer.optimizers.SGD().setup(chainer.links.Linear(1, 1))
    return SimpleNamespace(updater=chainer.training.StandardUpdater(iterator, optimizer)), iterator


def resume(kind, shuffle, before, after, steps):
    """Return an iterator that continues, with a dataset of another length, after a number of mini-batches."""
    saved, old = make(kind, before, shuffle)
    for _ in range(steps):
        old.next()
    state = {"updater/" + name: value for name, value in npz.serialize(saved.updater).items()}
    target, new = make(kind, after, shuffle)
    fitted = fit_iterators(state, target)
    npz.NpzDeserializer(fitted)["updater"].load(target.updater)
    return new


@pytest.mark.parametrize("kind", [SerialIterator, MultithreadIterator])
@pytest.mark.parametrize(
    ("shuffle", "before", "after", "position"),
    [(True, 12, 6, 5), (True, 6, 12, 8), (False, 12, 6, 4), (False, 12, 12, 10), (False, 48, 4, 3), (False, 10, 12, 0)],
)
def test_the_next_mini_batch_is_one_of_this_dataset(kind, shuffle, before, after, position):
    steps = {12: 5, 6: 2, 48: 20, 10: 5}[before]
    iterator = resume(kind, shuffle, before, after, steps)
    epoch = steps * 2 // before
    assert (iterator.epoch, iterator.current_position) == (epoch, position)
    assert len(iterator.next()) == 2
    assert iterator.epoch == epoch + (position + 2 >= after)
