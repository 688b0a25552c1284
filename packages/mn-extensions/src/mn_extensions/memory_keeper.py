"""An extension that saves the training's state in each node's memory, for the next attempt of a supervised job.

It also lets spares join: they wait in ``maybe_load`` until they are needed, and then receive another rank's state.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
from chainer.serializers import npz
from chainer.training import Extension

from mn_comm import CommunicatorBase, is_elastic, raise_on_all, transact
from mn_elastic import ElasticCommunicator, NodeMemory
from mn_extensions.checkpoint.arrays import State, is_none
from mn_extensions.checkpoint.replicas import assume_synchronized, optimizers_of, synchronize
from mn_extensions.checkpoint.state import check_fits, load_state
from mn_extensions.handover import Handover, Settings, apply_settings, hand_over, settings_of
from mn_extensions.snapshot import fit_iterators

logger = logging.getLogger(__name__)

_NONE = "none:"  # before the name of a value that is None
_TRAINING = "chainermn_training"
_numbers = itertools.count(1)


def create_memory_keeper(comm: CommunicatorBase) -> MemoryKeeper:
    """Create an extension that saves the training's state in memory, for a restart; collective.

    If ``chainermn elastic`` runs the job and restarts it, ``maybe_load`` continues from the state that was saved last,
    with any number of ranks: the memory of a single node is enough. In any other job, it saves and loads nothing.

    Each node holds one copy of the state, and a second one while it is written. The state is assumed to be the same on
    all ranks, as with data parallelism: parameters, optimizers, the trainer. State that only rank 0 has, such as the
    log, is saved as well. A shuffled part of a dataset from :func:`mn_data.scatter_dataset` continues at the same place
    in a different order; :class:`mn_data.ElasticIterator` continues exactly. Random number generators start again.

    In a job with spares, the spares wait in ``maybe_load``. On a spare, it returns when the spare takes the place of a
    lost rank, between two iterations of the other ranks, and has loaded the state of one of them. So the script must
    call ``maybe_load`` after everything else that communicates before the first iteration.

    If a script trains several times, one after the other, it must create an extension for each training, in the same
    order in every attempt. A state is loaded only into the training that saved it.

    Args:
        comm: The ranks that train together.

    Returns:
        The extension. Its trigger determines how often it saves the state: by default every 100 iterations.

    Example:
        >>> keeper = chainermn.extensions.create_memory_keeper(comm)
        >>> trainer.extend(keeper, trigger=(50, "iteration"))
        >>> keeper.maybe_load(trainer)  # the iteration, if the job was started again
    """
    return MemoryKeeper(comm)


class MemoryKeeper(Extension):  # type: ignore[misc]  # Chainer has no types
    """See :func:`mn_extensions.create_memory_keeper`."""

    priority = -100  # after all others, like checkpoints
    trigger = (100, "iteration")

    def __init__(self, comm: CommunicatorBase) -> None:
        self.comm = comm
        self._elastic: ElasticCommunicator | None = cast("ElasticCommunicator", comm) if is_elastic(comm) else None
        self._training = next(_numbers)
        self._optimizer: Any = None
        self._settings: list[Settings] = []
        self._memory = NodeMemory()
        # On all ranks or on none, because it is collective.
        self._is_there = all(transact(comm, lambda: comm.allgather_obj(self._memory.is_there)))

    def __call__(self, trainer: Any) -> None:
        """Save the trainer's state; collective."""
        self._keep_if_there(trainer, trainer.updater.iteration)

    def keep(self, target: Any, iteration: int) -> None:
        """Save a state, which replaces the previous one, and let spares join if ranks were lost; collective.

        Args:
            target: A trainer, or anything else that Chainer can serialize.
            iteration: The number of the state, the same on every rank.

        Raises:
            TypeError: The state holds Python objects (on every rank).
        """
        self._keep_if_there(target, iteration)
        self.let_in(target, iteration)

    def let_in(self, target: Any, iteration: int) -> None:
        """Let spares take the places of ranks that were lost, and send them a state; collective, between two steps.

        A trainer that was passed to :meth:`maybe_load` calls this after each of its iterations, after all other
        extensions. This does nothing, and sends nothing, unless ranks were lost and spares remain.

        Args:
            target: The object that spares have passed to :meth:`maybe_load`, for example the trainer.
            iteration: The number of the state, the same on every rank.
        """
        comm = self._elastic
        if comm is None or not comm.lacks_ranks:
            return
        comm.fill_places()

        def take() -> Handover:
            settings = settings_of(self._optimizers(target))
            return Handover(self._training, iteration, _state_of(target), settings)

        synchronize(target)
        transact(comm, lambda: hand_over(comm, take))

    def _keep_if_there(self, target: Any, iteration: int) -> None:
        if self._is_there:
            synchronize(target)
            transact(self.comm, partial(self._keep, target, iteration))

    def _keep(self, target: Any, iteration: int) -> None:
        is_first = self.comm.intra_rank == 0
        state: State = {}
        with raise_on_all(self.comm):
            if is_first or self.comm.rank == 0:
                state = _state_of(target)
        # Extensions differ between ranks: rank 0 has a log, for example. Arrays of the model are not sent.
        of_trainer = [name for name in state if hasattr(target, "updater") and not name.startswith("updater/")]
        of_rank_0 = self.comm.bcast_obj({name: state[name] for name in of_trainer})
        with raise_on_all(self.comm):
            if is_first:
                self._put(iteration, {**state, **of_rank_0, _TRAINING: np.asarray(self._training)})

    def _put(self, iteration: int, state: State) -> None:
        generation = 0 if self._elastic is None else self._elastic.generation
        try:
            self._memory.put(iteration, state, generation)
        except OSError as error:  # the older state still exists
            logger.warning("the state of iteration %d is not kept in memory: %s", iteration, error)

    def maybe_load(self, target: Any, optimizer: Any = None) -> int | None:
        """Load the newest state that the memory of a node holds, if there is one; collective.

        In a job with spares, the spares wait here. They load the state of another rank when they take a place.

        Args:
            target: The object whose state was saved: a trainer before it runs, or something else.
            optimizer: A multi-node optimizer whose next update takes a step, rather than distribute the parameters of
                rank 0; by default the optimizers of the trainer. A spare also gets its hyperparameters, so without a
                trainer it must be given on every rank.

        Returns:
            The iteration that was loaded, or ``None`` if there is none.

        Raises:
            ValueError: The state belongs to a different model (on every rank); then nothing was loaded.
        """
        found: int | None = None
        self._optimizer = optimizer
        if self._is_there:
            found = transact(self.comm, partial(self._load, target, optimizer))
        comm = self._elastic
        if comm is None:
            return found
        has_waited = comm.take_places()
        is_trainer = _is_trainer(target)
        if is_trainer and comm.has_spares:
            target.extend(_Door(self, comm), name=_Door.name, trigger=lambda _: comm.lacks_ranks)
        if not has_waited:
            return found
        found = self._catch_up(comm, target)
        if is_trainer:
            comm.catch_up("maybe_load")
        return found

    def _catch_up(self, comm: ElasticCommunicator, target: Any) -> int:
        """Receive the state of another rank, and load it; collective: the other ranks call :meth:`let_in`."""
        began = time.monotonic()
        handover = transact(comm, lambda: hand_over(comm, None))
        assert handover is not None  # this rank has joined, so it receives one
        if handover.training != self._training:
            raise RuntimeError(
                f"expected the state of training {self._training} of this script, got that of training "
                f"{handover.training}: a spare cannot skip a training"
            )
        state = _loadable(handover.state)
        check_fits(state, target)
        self._load_state(state, target)
        self._settings = handover.settings
        if not _is_trainer(target):
            self.apply_settings(target)
        for each in self._optimizers(target):
            if hasattr(each, "assume_synchronized") and each.target is not None:
                each.assume_synchronized()
        size = sum(array.nbytes for array in state.values()) / 1e6
        logger.warning(
            "rank %d of %d got the state of iteration %d: %.1f MB in %.0f ms",
            *(self.comm.rank, self.comm.size, handover.number, size, 1000 * (time.monotonic() - began)),
        )
        return handover.number

    def _optimizers(self, target: Any) -> list[Any]:
        return optimizers_of(target) if self._optimizer is None else [self._optimizer]

    def apply_settings(self, target: Any) -> None:
        """Set the hyperparameters that a spare has received; on other ranks, this does nothing.

        With a trainer, this must come after its extensions are initialized: Chainer's extensions that shift a learning
        rate then read the one from before the training.

        Args:
            target: The object that was passed to :meth:`maybe_load`.
        """
        if self._settings:
            apply_settings(self._optimizers(target), self._settings)
            self._settings = []

    def _load_state(self, state: State, target: Any) -> None:
        with _without_missing_extensions(state, target) as lacking:
            load_state(fit_iterators(state, target), target)
        if lacking:
            logger.warning(
                "rank %d: the state in memory has nothing of %s, which starts again", self.comm.rank, ", ".join(lacking)
            )

    def _load(self, target: Any, optimizer: Any) -> int | None:
        found = self._memory.get()
        numbers = self.comm.allgather_obj(-1 if found is None else found[0])
        newest = int(max(numbers))
        if newest < 0:
            return None
        state = {} if found is None else found[1]
        if min(numbers) < newest:
            state = self.comm.bcast_obj(state, root=numbers.index(newest))
        state = _loadable(state)
        training = int(state.pop(_TRAINING))
        if training != self._training:
            if self.comm.rank == 0 and training > self._training:
                message = "training %d of this script is repeated: the state in memory is of training %d"
                logger.warning(message, self._training, training)
            return None
        with raise_on_all(self.comm):
            check_fits(state, target)
        with raise_on_all(self.comm):
            self._load_state(state, target)
        assume_synchronized(target, optimizer)
        if self.comm.rank == 0:
            logger.info("went on at iteration %d, from the memory of a node", newest)
        return newest


class _Door(Extension):  # type: ignore[misc]  # Chainer has no types
    """Lets spares join after an iteration, when all other extensions have been called.

    Args:
        keeper: Sends them the state.
        comm: The ranks.
    """

    name = "chainermn_spares"
    priority = float("-inf")

    def __init__(self, keeper: MemoryKeeper, comm: ElasticCommunicator) -> None:
        self._keeper = keeper
        self._comm = comm

    def initialize(self, trainer: Any) -> None:
        """Allow transactions again on a rank that has joined: from here on, it does the same as the other ranks."""
        self._keeper.apply_settings(trainer)
        self._comm.catch_up("")

    def __call__(self, trainer: Any) -> None:
        """Let spares join; collective."""
        self._keeper.let_in(trainer, trainer.updater.iteration)


@contextmanager
def _without_missing_extensions(state: State, target: Any) -> Iterator[list[str]]:
    """Hide the extensions of a trainer that are not in a state: only rank 0's are saved."""
    if not _is_trainer(target):
        yield []
        return
    of_trainer = vars(target)
    extensions = of_trainer["_extensions"]
    lacking = [name for name, entry in extensions.items() if not _is_known(name, state) and _has_state(entry)]
    of_trainer["_extensions"] = {name: entry for name, entry in extensions.items() if name not in lacking}
    try:
        yield lacking
    finally:
        of_trainer["_extensions"] = extensions


def _is_trainer(target: Any) -> bool:
    return hasattr(type(target), "extend")


def _has_state(entry: Any) -> bool:
    return any(npz.serialize(each) for each in (entry.extension, entry.trigger) if hasattr(each, "serialize"))


def _is_known(name: str, state: State) -> bool:
    return any(key.startswith((f"extensions/{name}/", f"extension_triggers/{name}/")) for key in state)


def _state_of(target: Any) -> State:
    """Return a target's state, without Python objects."""
    state = {name: np.asarray(value) for name, value in npz.serialize(target).items()}
    return dict((_NONE + name, np.zeros(0)) if is_none(value) else (name, value) for name, value in state.items())


def _loadable(state: State) -> State:
    """Return a state in the form that Chainer's deserializers read."""
    return {
        name.removeprefix(_NONE): np.asarray(None) if name.startswith(_NONE) else value for name, value in state.items()
    }
