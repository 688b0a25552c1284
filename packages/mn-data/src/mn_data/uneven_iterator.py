"""Keeping the iterators of all ranks in step if the ranks have different numbers of samples."""

from __future__ import annotations

from typing import Any

from mn_comm import CommunicatorBase, raise_on_all
from mn_data.wrapper import Wrapper, set_option


def create_uneven_iterator(actual_iterator: Any, communicator: CommunicatorBase) -> Any:
    """Keep the iterators of ranks with different numbers of samples in step; collective.

    In each epoch, every rank goes through its samples exactly once; its last batch may be smaller. A rank that has no
    more samples gets empty batches until the rank with the most samples has finished. So epochs begin and end on all
    ranks together, and all triggers fire together. If a batch is empty, :class:`mn_optim.MultiNodeUpdater` takes part
    in the update without data::

        train = chainermn.scatter_dataset(train, comm, shuffle=True, force_equal_length=False)
        iterator = create_uneven_iterator(chainer.iterators.SerialIterator(train, 32), comm)
        updater = chainermn.MultiNodeUpdater(iterator, optimizer)

    Getting the next batch is not collective. ``serialize`` saves and loads the position of the iteration and the actual
    iterator; if the numbers of samples have changed in the meantime, getting the next batch is collective.

    Args:
        actual_iterator: A ``SerialIterator``, ``MultithreadIterator`` or ``MultiprocessIterator`` over this rank's
            samples, of which there may be none; or another iterator that has ``dataset``, ``batch_size`` and ``reset``,
            and ends after an epoch. If it has been used, it is reset to its beginning. From now on, it ends after each
            epoch; if it was set to repeat, the returned iterator repeats instead.
        communicator: The ranks.

    Returns:
        The iterator. Its other attributes are those of ``actual_iterator``.

    Raises:
        TypeError: ``actual_iterator`` lacks one of these attributes (on every rank).
        ValueError: No rank has any samples (on every rank).
    """
    with raise_on_all(communicator):
        for name in ("dataset", "batch_size", "reset", "__next__"):
            if not hasattr(actual_iterator, name):
                raise TypeError(
                    f"expected an iterator with dataset, batch_size and reset, got {type(actual_iterator).__name__} "
                    f"without {name}"
                )
        repeats = _end_after_each_epoch(actual_iterator)
        n_batches = -(-len(actual_iterator.dataset) // actual_iterator.batch_size)
    with raise_on_all(communicator):  # apart: only now it is known that no rank has one whose reset is collective
        if n_batches and getattr(actual_iterator, "epoch_detail", 0):
            actual_iterator.reset()
    longest = max(communicator.allgather_obj(n_batches))
    if not longest:
        raise ValueError("expected at least one sample on some rank, got none on any rank")
    return _UnevenIterator(actual_iterator, communicator, longest, repeats)


class _UnevenIterator(Wrapper):
    """See :func:`create_uneven_iterator`.

    Attributes:
        may_be_empty: Whether batches may be empty; updaters read this.
    """

    _OWN = (
        *("actual_iterator", "communicator", "epoch", "is_new_epoch", "previous_epoch_detail", "repeat"),
        *("_has_ended", "_longest", "_n_steps", "_step"),
    )

    may_be_empty = True

    def __init__(self, actual_iterator: Any, communicator: CommunicatorBase, longest: int, repeats: bool) -> None:
        self.actual_iterator = actual_iterator
        self.communicator = communicator
        self.repeat = repeats
        self.epoch = 0
        self.is_new_epoch = False
        self.previous_epoch_detail: float | None = None
        self._has_ended = False
        self._longest = longest
        self._step = 0
        self._n_steps: int | None = longest

    def __next__(self) -> Any:
        if self._n_steps is None:
            self._n_steps = self._step + max(self.communicator.allgather_obj(self._n_left()))
        if self.epoch and not self._step:
            if not self.repeat:
                raise StopIteration
            if self.is_new_epoch:
                self.actual_iterator.reset()
                self._has_ended = False
                self._n_steps = self._longest
        self.previous_epoch_detail = self.epoch_detail
        batch = self._batch()
        self._step += 1
        self.is_new_epoch = self._step >= self._n_steps
        if self.is_new_epoch:
            self.epoch, self._step = self.epoch + 1, 0
        return batch

    def _batch(self) -> Any:
        """Return the next batch of this epoch, or an empty one."""
        actual = self.actual_iterator
        # Chainer's MultiprocessIterator would wait forever if it were called again after its end.
        if not len(actual.dataset) or self._has_ended or getattr(actual, "epoch", False):
            return []
        try:
            return next(actual)
        except StopIteration:
            self._has_ended = True
            return []

    @property
    def epoch_detail(self) -> float:
        """The epochs so far, with their fraction; the same on all ranks."""
        return float(self.epoch + self._step / (self._n_steps or self._longest))

    def reset(self) -> None:
        """Go back to the beginning; must be called on every rank."""
        self.actual_iterator.reset()
        self.epoch, self.is_new_epoch, self.previous_epoch_detail = 0, False, None
        self._has_ended, self._step, self._n_steps = False, 0, self._longest

    def serialize(self, serializer: Any) -> None:
        """Save or load the position of the iteration; not collective."""
        self.actual_iterator.serialize(serializer["actual_iterator"])
        self.epoch = int(serializer("epoch", self.epoch))
        self.is_new_epoch = bool(serializer("is_new_epoch", self.is_new_epoch))
        previous = serializer("previous_epoch_detail", _number(self.previous_epoch_detail))
        self.previous_epoch_detail = None if previous < 0 else float(previous)
        longest = int(serializer("n_batches", self._longest))
        n_steps = int(serializer("n_steps", self._n_steps or self._longest))
        self._step = int(serializer("step", self._step))
        self._n_steps = n_steps
        if longest != self._longest:  # samples are now distributed differently
            self._step = self._step * self._longest // n_steps
            self._n_steps = None if self._step else self._longest

    def _n_left(self) -> int:
        """Return how many batches of this epoch this rank still has."""
        actual = self.actual_iterator
        if not len(actual.dataset) or actual.epoch:
            return 0
        return int(-(-(len(actual.dataset) - actual.current_position) // actual.batch_size))


def _end_after_each_epoch(iterator: Any) -> bool:
    """Make an iterator of Chainer end after an epoch. Return whether it was set to repeat."""
    if not getattr(iterator, "repeat", False):
        return not hasattr(iterator, "repeat")  # an iterator without this attribute must be reset after each epoch
    set_option(iterator, "repeat", False)
    return True


def _number(detail: float | None) -> float:
    return -1.0 if detail is None else detail
