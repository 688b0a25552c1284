"""An iterator that gives all ranks the batches of one rank."""

from __future__ import annotations

import pickle
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from chainer.dataset import Iterator

from mn_comm import CommunicatorBase, raise_on_all
from mn_comm.building_blocks import refuse_elastic
from mn_data.wrapper import Wrapper


def create_multi_node_iterator(actual_iterator: Any, communicator: CommunicatorBase, rank_master: int = 0) -> Any:
    """Give all ranks the batches of one rank's iterator; collective.

    For models that span ranks which need the same batch, for example if one rank uses the input and another one the
    labels. The batches are sent. If every rank has the dataset, :func:`create_synchronized_iterator` makes this
    unnecessary.

    The batches may contain anything that can be pickled: arrays of any dtype, tuples, dictionaries, strings. Getting
    the next batch and ``reset`` are collective. ``serialize`` is not: each rank saves and loads the position of the
    iteration and the order of the samples. A ``SerialIterator`` or ``MultiprocessIterator`` over the same dataset can
    load the saved state of any rank, and continue from there.

    Args:
        actual_iterator: At ``rank_master`` an iterator of Chainer's, or one with the same interface; ignored elsewhere.
        communicator: The ranks.
        rank_master: The rank whose batches all ranks get.

    Returns:
        The iterator. At ``rank_master`` its other attributes are those of ``actual_iterator``; elsewhere it has
        ``dataset_size``, the length of the dataset at ``rank_master``, or ``None`` if that is unknown.

    Raises:
        TypeError: ``actual_iterator`` at ``rank_master`` is not an iterator (on every rank).
        ValueError: ``rank_master`` is out of range.
    """
    refuse_elastic(communicator, "an iterator of which one rank has the order", "use mn_data.ElasticIterator")
    with raise_on_all(communicator):
        if not 0 <= rank_master < communicator.size:
            raise ValueError(f"expected rank_master in 0..{communicator.size - 1}, got {rank_master}")
        if communicator.rank == rank_master and not hasattr(actual_iterator, "__next__"):
            raise TypeError(f"expected an iterator at rank {rank_master}, got {type(actual_iterator).__name__}")
    kind = _Master if communicator.rank == rank_master else _Follower
    return kind(actual_iterator, communicator, rank_master)


class _State(NamedTuple):
    """The position of an iteration; if an iterator does not know its position, it counts as being at its beginning."""

    epoch: int = 0
    is_new_epoch: bool = False
    current_position: int = 0
    epoch_detail: float = 0.0
    previous_epoch_detail: float | None = None


_Order: TypeAlias = "np.ndarray[Any, Any] | None"


class _Master(Wrapper):
    """The iterator of the rank that has the batches."""

    _OWN = ("_shared_order", "actual_iterator", "communicator", "rank_master")

    def __init__(self, actual_iterator: Any, communicator: CommunicatorBase, rank_master: int) -> None:
        self.actual_iterator = actual_iterator
        self.communicator = communicator
        self.rank_master = rank_master
        self._shared_order: _Order = None
        self._share(lambda: None)

    def __next__(self) -> Any:
        return self._share(self.actual_iterator.__next__)

    def reset(self) -> None:
        """Go back to the beginning; collective."""
        self._share(lambda: self.actual_iterator.reset())  # raises on all ranks if it has none

    def serialize(self, serializer: Any) -> None:
        """Save or load the actual iterator."""
        self.actual_iterator.serialize(serializer)
        self._shared_order = None  # loading changes it in place

    def _share(self, action: Any) -> Any:
        """Do something with the actual iterator, and tell the followers the result."""
        result, is_over = None, False
        with raise_on_all(self.communicator):
            try:
                result = action()
            except StopIteration:
                is_over = True
            order = getattr(getattr(self.actual_iterator, "_state", None), "order", None)
            news = None if order is self._shared_order else order
            message = pickle.dumps((*self._standing(), news, result, is_over), pickle.HIGHEST_PROTOCOL)
        self.communicator.bcast(np.frombuffer(message, dtype=np.uint8), root=self.rank_master)
        self._shared_order = order
        if is_over:
            raise StopIteration
        return result

    def _standing(self) -> tuple[_State, int | None]:
        """Return the position, and the dataset's length."""
        dataset: Any = getattr(self.actual_iterator, "dataset", None)
        size = len(dataset) if hasattr(dataset, "__len__") else None
        return _state_of(self.actual_iterator), size


class _Follower(Iterator):  # type: ignore[misc]  # Chainer has no types
    """The iterator of a rank that receives the batches."""

    # Read-only, like those of most of Chainer's iterators.
    epoch = property(attrgetter("_state.epoch"), doc="How often the master's iterator went through its dataset.")
    is_new_epoch = property(attrgetter("_state.is_new_epoch"), doc="Whether the last batch ended an epoch.")
    current_position = property(
        attrgetter("_state.current_position"), doc="How many samples of this epoch have been returned already."
    )
    epoch_detail = property(attrgetter("_state.epoch_detail"), doc="The epochs so far, with their fraction.")
    previous_epoch_detail = property(
        attrgetter("_state.previous_epoch_detail"), doc="``epoch_detail`` before the last batch."
    )

    def __init__(self, actual_iterator: Any, communicator: CommunicatorBase, rank_master: int) -> None:
        self.communicator = communicator
        self.rank_master = rank_master
        self._state = _State()
        self._order: _Order = None
        self.dataset_size: int | None = None
        self._receive()

    def __next__(self) -> Any:
        return self._receive()

    def reset(self) -> None:
        """Go back to the beginning; collective."""
        self._receive()

    def serialize(self, serializer: Any) -> None:
        """Save or load the position of the iteration, under the names that Chainer's iterators use."""
        state = self._state
        # As Chainer's iterators save it: they use -1 where this iterator has None.
        previous = -1.0 if state.previous_epoch_detail is None else state.previous_epoch_detail
        saved = state._replace(previous_epoch_detail=previous)._asdict()
        loaded = {name: _serialize(serializer, name, value) for name, value in saved.items()}
        if loaded["previous_epoch_detail"] is not None and loaded["previous_epoch_detail"] < 0:
            loaded["previous_epoch_detail"] = None
        self._state = self._with_detail(_State(**loaded), state)
        if self._order is not None:
            self._order = _serialize(serializer, "order", self._order)

    def _with_detail(self, state: _State, before: _State) -> _State:
        """Compute ``epoch_detail``, which Chainer's iterators do not save, from the values that they save."""
        is_moved = (state.epoch, state.current_position) != (before.epoch, before.current_position)
        if self.dataset_size and is_moved and state.epoch_detail == before.epoch_detail:
            return state._replace(epoch_detail=state.epoch + state.current_position / self.dataset_size)
        return state

    def _receive(self) -> Any:
        with raise_on_all(self.communicator):
            pass  # raises the exception of the master's iterator
        message = self.communicator.bcast(None, root=self.rank_master)
        self._state, self.dataset_size, new_order, result, is_over = pickle.loads(message.data)
        if new_order is not None:
            self._order = new_order
        if is_over:
            raise StopIteration
        return result


def _serialize(serializer: Any, name: str, value: Any) -> Any:
    try:
        return serializer(name, value)
    except KeyError:  # in another iterator's file: the next batch supplies missing values
        return value


def _state_of(iterator: Any) -> _State:
    default = _State()
    return _State(*(getattr(iterator, name, getattr(default, name)) for name in _State._fields))
