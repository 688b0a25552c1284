"""The same order of samples on all ranks, without sending any."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from chainer.iterators import OrderSampler

from mn_comm import CommunicatorBase, expect_same, raise_on_all
from mn_comm.building_blocks import refuse_elastic
from mn_data.wrapper import Wrapper, set_option


def create_synchronized_iterator(actual_iterator: Any, communicator: CommunicatorBase) -> Any:
    """Make the iterators of all ranks shuffle in the same order; collective.

    For models that span ranks which need the same batch, if every rank has the whole dataset or its own columns of it.
    An iterator that does not shuffle is not changed. Resumed training continues with the same order as uninterrupted
    training.

    Args:
        actual_iterator: One of Chainer's iterators, or one that has an ``order_sampler`` and ``reset``; it is reset to
            its beginning.
        communicator: The ranks.

    Returns:
        The iterator; its other attributes are those of ``actual_iterator``.

    Raises:
        ValueError: It has no ``order_sampler``; or the ranks differ in the length of the dataset, ``batch_size`` or
            whether they shuffle (on every rank).
    """
    refuse_elastic(communicator, "an iterator of which one rank has the order", "use mn_data.ElasticIterator")
    with raise_on_all(communicator):
        if not hasattr(actual_iterator, "order_sampler"):
            raise ValueError(
                f"expected an iterator with an order_sampler, got {type(actual_iterator).__name__}: "
                f"{actual_iterator!r:.80}"
            )
        length = len(actual_iterator.dataset)
        options = (getattr(actual_iterator, "batch_size", None), actual_iterator.order_sampler is not None)
    expect_same(communicator, "number of samples", length)
    expect_same(communicator, "batch_size and shuffling", options)
    seed = communicator.bcast_obj(int(np.random.randint(2**31 - 1)) if communicator.rank == 0 else None)
    return _SynchronizedIterator(actual_iterator, seed)


class _Order(OrderSampler):  # type: ignore[misc]  # Chainer has no types
    """An order that depends only on the previous order.

    A random number generator would have to be called equally often on every rank, but iterators that prefetch in
    threads or processes do not do so.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, current_order: np.ndarray[Any, Any], current_position: int) -> np.ndarray[Any, Any]:
        before = np.ascontiguousarray(current_order, dtype="<i8").tobytes()
        digest = hashlib.blake2b(before, digest_size=16, key=self.seed.to_bytes(8, "little")).digest()
        random = np.random.RandomState(np.frombuffer(digest, dtype="<u4").astype(np.uint32))
        return random.permutation(len(current_order))


class _SynchronizedIterator(Wrapper):
    """An iterator whose orders are derived from a seed."""

    _OWN = ("_order", "actual_iterator")

    def __init__(self, actual_iterator: Any, seed: int) -> None:
        self.actual_iterator = actual_iterator
        self._order = _Order(seed)
        if actual_iterator.order_sampler is not None:
            set_option(actual_iterator, "order_sampler", self._order)
            actual_iterator.reset()

    def __next__(self) -> Any:
        return self.actual_iterator.__next__()

    def serialize(self, serializer: Any) -> None:
        """Save or load the actual iterator and the seed."""
        try:
            self._order.seed = int(serializer("synchronized_seed", self._order.seed))
        except KeyError:
            pass  # a snapshot of an old version: from the next epoch on, a different order, but the same on all ranks
        self.actual_iterator.serialize(serializer)
