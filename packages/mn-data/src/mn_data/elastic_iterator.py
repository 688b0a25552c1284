"""An iterator that deals every sample exactly once per epoch, even if the number of ranks changes between steps."""

from __future__ import annotations

import operator
import weakref
from itertools import chain, pairwise
from typing import Any

import chainer
import numpy as np
from chainer.dataset import Iterator

from mn_comm import Change, CommunicatorBase, expect_same, is_elastic, raise_on_all, transact
from mn_data.deal import Deal
from mn_data.loading import Loader

_Positions = np.ndarray[Any, np.dtype[np.int64]]
_NOTHING: _Positions = np.zeros(0, np.int64)


class ElasticIterator(Iterator):  # type: ignore[misc]  # Chainer has no types
    """Gives each rank its part of every global mini-batch; for training.

    All ranks use the same order, which depends on the seed and the epoch. If a rank is lost before a step is taken, the
    samples that were dealt to it are dealt again to the remaining ranks. So each sample is used exactly once per epoch,
    with any number of ranks: a sample counts as used when a multi-node optimizer on the same communicator has taken a
    step. A batch may extend into the next epoch, so that no rank ever has an empty one.

    It works with any communicator; if the communicator is not elastic, dealt samples count as used. Creating it is
    collective; :meth:`next` is not, but every rank must call it in each step.

    Args:
        dataset: The same on every rank: each rank holds all of it, or can read any sample by its index.
        batch_size: How many samples a rank gets in each step or, with ``global_batch``, all ranks together.
        comm: The ranks.
        shuffle: Whether each epoch has a different random order.
        seed: The seed for the orders; by default a number that rank 0 draws.
        global_batch: Whether the global mini-batch keeps its size when ranks are lost, rather than each rank's part of
            it.
        n_processes: How many processes read samples ahead of time; 0 to read samples when they are needed. If one of
            them dies, the next mini-batch raises ``BrokenProcessPool``.
        n_prefetch: How many mini-batches these processes read ahead, at least 1.

    Raises:
        ValueError: On every rank: the dataset is empty, ``n_prefetch`` is below 1, ``batch_size`` is below 1 or, as a
            global size, below the number of ranks, or the ranks differ in one of these.
        TypeError: An argument is not an integer (on every rank).
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        comm: CommunicatorBase,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        global_batch: bool = False,
        n_processes: int = 0,
        n_prefetch: int = 1,
    ) -> None:
        self._loader = Loader(dataset, n_processes)  # first: __del__ is called even if __init__ fails later

        def agree() -> int | None:
            with raise_on_all(comm):
                for number in (batch_size, n_processes, n_prefetch):
                    operator.index(number)
                if n_processes and n_prefetch < 1:
                    raise ValueError(f"expected n_prefetch of at least 1, got {n_prefetch}")
                _check(len(dataset), batch_size, comm.size if global_batch else 1)
            alike = (len(dataset), batch_size, shuffle, seed, global_batch)
            expect_same(comm, "length, batch_size, shuffle, seed and global_batch", alike)
            drawn = int(np.random.randint(2**31 - 1)) if comm.rank == 0 and seed is None else seed
            return comm.bcast_obj(drawn) if shuffle else None

        self._deal = Deal(len(dataset), transact(comm, agree))
        self.dataset = dataset
        self.batch_size = batch_size
        self.comm = comm
        self.global_batch = global_batch
        self._n_prefetch = n_prefetch
        self._under_way: list[list[_Positions]] = []  # each rank's part of the global mini-batches since the last step
        self._before: int | None = None  # how many samples had been dealt before the last mini-batch
        if is_elastic(comm):
            # The communicator, which may last longer, does not keep the iterator.
            comm.on_change(weakref.WeakMethod(self.take_over))  # type: ignore[attr-defined]
            comm.on_commit(weakref.WeakMethod(self.commit))  # type: ignore[attr-defined]

    def __next__(self) -> list[Any]:
        """Return this rank's part of the next global mini-batch."""
        deal, bounds = self._deal, self._bounds()
        count, (begin, end) = int(bounds[-1]), bounds[self.comm.rank : self.comm.rank + 2]
        n_ahead = self._n_prefetch if self._loader.n_processes else 0
        now, *later = [deal.indices(each[begin:end]) for each in deal.peek((1 + n_ahead) * count).reshape(-1, count)]
        batch = self._loader.load(now)
        self._loader.expect(later)
        # Only now: if a sample cannot be read, or a signal handler raises, this mini-batch comes again.
        self._before = deal.dealt
        drawn = deal.draw(count)
        if is_elastic(self.comm):
            # np.split takes ten times as long.
            self._under_way.append([drawn[begin:end] for begin, end in pairwise(bounds.tolist())])
        return batch

    next = __next__

    def commit(self) -> None:
        """Count all dealt samples as used. The steps of a multi-node optimizer on the communicator call this."""
        self._under_way.clear()

    @property
    def epoch(self) -> int:
        """How many epochs all ranks together have completed."""
        return self._deal.dealt // self._deal.length

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last mini-batch has completed an epoch."""
        return self._before is not None and self.epoch > self._before // self._deal.length

    @property
    def epoch_detail(self) -> float:
        """The number of epochs, including the fraction of the current one."""
        return self._deal.dealt / self._deal.length

    @property
    def previous_epoch_detail(self) -> float | None:
        """The value of ``epoch_detail`` before the last mini-batch; ``None`` before the first mini-batch."""
        return None if self._before is None else self._before / self._deal.length

    @property
    def repeat(self) -> bool:
        """Whether the iterator continues after an epoch; always true."""
        return True

    def serialize(self, serializer: Any) -> None:
        """Save or load the position of all ranks, the same on each rank; a different number of ranks can load it."""
        if isinstance(serializer, chainer.Serializer):
            under_way = np.concatenate([_NOTHING, *chain.from_iterable(self._under_way)])
            next_position, returned = self._deal.state(under_way)
            serializer("next_position", next_position)
            # Not an array, because their number differs from state to state.
            serializer("returned", ",".join(map(str, returned)))
            serializer("seed", -1 if self._deal.seed is None else self._deal.seed)
            serializer("length", self._deal.length)
            serializer("before", -1 if self._before is None else self._before)
            return
        found = {key: serializer(key, None) for key in ("next_position", "returned", "seed", "length", "before")}
        if int(found["length"]) != self._deal.length:
            raise ValueError(f"expected a state over {self._deal.length} samples, got one over {int(found['length'])}")
        seed = int(found["seed"])
        self._deal = Deal(self._deal.length, None if seed < 0 else seed)
        self._deal.load(int(found["next_position"]), _positions(str(found["returned"])))
        self._before = int(found["before"]) if int(found["before"]) >= 0 else None
        self._under_way.clear()

    def finalize(self) -> None:
        """End the processes that read samples."""
        self._loader.close()

    def __del__(self) -> None:
        """End these processes without waiting for them: Python calls this at any moment, in any thread."""
        self._loader.drop()

    def _bounds(self) -> _Positions:
        """Return where each rank's part of a global mini-batch begins, and where the last one ends."""
        ranks = np.arange(self.comm.size + 1)
        return self.batch_size * ranks // self.comm.size if self.global_batch else self.batch_size * ranks

    def take_over(self, change: Change) -> None:
        """Give back the samples dealt since the last step to ranks that were lost or set aside.

        An elastic communicator calls this.
        """
        for parts in self._under_way:
            for lost in (*change.lost, *change.set_aside):
                self._deal.give_back(parts[lost])
            remaining = [parts[old] for old in change.survivors]
            parts[:] = [*remaining, *[_NOTHING] * (change.size - len(remaining))]


def _positions(text: str) -> _Positions:
    return np.array(text.split(",") if text else [], np.int64)


def _check(length: int, batch_size: int, least: int) -> None:
    if not length:
        raise ValueError("expected a dataset with samples, got an empty one")
    if batch_size < least:
        raise ValueError(f"expected batch_size of at least {least}, a sample for each rank; got {batch_size}")
