"""One rank's batches, on all ranks."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np
from chainer.dataset import Iterator

from mn_comm import CommunicatorBase, raise_on_all
from mn_data.wrapper import Wrapper

__all__ = ["create_multi_node_iterator"]


def create_multi_node_iterator(actual_iterator: Any, communicator: CommunicatorBase, rank_master: int = 0) -> Any:
    """Give all ranks the batches that one rank's iterator makes; collective.

    For models that span ranks which need the same batch, as when the input is on one and the labels on another. The
    batches travel; where every rank has the dataset, :func:`create_synchronized_iterator` saves that.

    The batches may hold anything that can be pickled: arrays of any dtype, tuples, dictionaries, strings. Getting the
    next one, and ``reset``, are collective; ``serialize`` is not: each rank saves and loads where the iteration stands.

    Args:
        actual_iterator: At ``rank_master`` an iterator, Chainer's or one like them; ignored elsewhere.
        communicator: The ranks.
        rank_master: The rank whose batches all get.

    Returns:
        The iterator. At ``rank_master`` its other attributes are those of ``actual_iterator``.

    Raises:
        TypeError: ``actual_iterator`` at ``rank_master`` is not an iterator (on every rank).
        ValueError: ``rank_master`` is out of range.
    """
    with raise_on_all(communicator):
        if not 0 <= rank_master < communicator.size:
            raise ValueError(f"expected rank_master in 0..{communicator.size - 1}, got {rank_master}")
        if communicator.rank == rank_master and not hasattr(actual_iterator, "__next__"):
            raise TypeError(f"expected an iterator at rank {rank_master}, got {type(actual_iterator).__name__}")
    kind = _Master if communicator.rank == rank_master else _Follower
    return kind(actual_iterator, communicator, rank_master)


class _State(NamedTuple):
    """Where an iteration stands; an iterator that does not know it counts as standing at its beginning."""

    epoch: int = 0
    is_new_epoch: bool = False
    current_position: int = 0
    epoch_detail: float = 0.0
    previous_epoch_detail: float | None = None


class _Master(Wrapper):
    """The iterator of the rank that has the batches."""

    _OWN = ("actual_iterator", "communicator", "rank_master")

    def __init__(self, actual_iterator: Any, communicator: CommunicatorBase, rank_master: int) -> None:
        self.actual_iterator = actual_iterator
        self.communicator = communicator
        self.rank_master = rank_master
        self._share(None)

    def __next__(self) -> Any:
        return self._share(self.actual_iterator.__next__)

    def reset(self) -> None:
        """Go back to the beginning; collective."""
        self._share(self.actual_iterator.reset)

    def serialize(self, serializer: Any) -> None:
        """Save or load the actual iterator."""
        self.actual_iterator.serialize(serializer)

    def _share(self, action: Any) -> Any:
        """Do something with the actual iterator, and tell the followers what came of it."""
        result, is_over = None, False
        with raise_on_all(self.communicator):
            try:
                result = None if action is None else action()
            except StopIteration:
                is_over = True
            message = pickle.dumps((_state_of(self.actual_iterator), result, is_over), pickle.HIGHEST_PROTOCOL)
        self.communicator.bcast(np.frombuffer(message, dtype=np.uint8), root=self.rank_master)
        if is_over:
            raise StopIteration
        return result


class _Follower(Iterator):  # type: ignore[misc]  # Chainer has no types
    """The iterator of a rank that receives the batches."""

    def __init__(self, actual_iterator: Any, communicator: CommunicatorBase, rank_master: int) -> None:
        self.communicator = communicator
        self.rank_master = rank_master
        self._state = _State()
        self._receive()

    def __next__(self) -> Any:
        return self._receive()

    def next(self) -> Any:
        """Return the next batch; collective."""
        return self.__next__()

    def reset(self) -> None:
        """Go back to the beginning; collective."""
        self._receive()

    def finalize(self) -> None:
        """Do nothing: the iterator is the master's."""

    def serialize(self, serializer: Any) -> None:
        """Save or load where the iteration stands, under the names that Chainer's iterators use."""
        loaded = {}
        for name, value in self._state._asdict().items():
            try:
                loaded[name] = serializer(name, value)
            except KeyError:  # in the master's own file: what it did not save, the next batch tells
                loaded[name] = value
        self._state = _State(**loaded)

    @property
    def epoch(self) -> int:
        """How often the master's iterator went through its dataset."""
        return self._state.epoch

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last batch ended an epoch."""
        return self._state.is_new_epoch

    @property
    def current_position(self) -> int:
        """How many samples of this epoch came already."""
        return self._state.current_position

    @property
    def epoch_detail(self) -> float:
        """The epochs so far, with their fraction."""
        return self._state.epoch_detail

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch."""
        return self._state.previous_epoch_detail

    def _receive(self) -> Any:
        with raise_on_all(self.communicator):
            pass  # raises what the master's iterator raised
        message = self.communicator.bcast(None, root=self.rank_master)
        self._state, result, is_over = pickle.loads(message.data)
        if is_over:
            raise StopIteration
        return result


def _state_of(iterator: Any) -> _State:
    default = _State()
    return _State(*(getattr(iterator, name, getattr(default, name)) for name in _State._fields))
