"""The elastic communicator: one object for the whole training, which rebuilds itself when a rank is lost."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mn_comm import agreement, spans
from mn_comm.communicator import Communicator
from mn_comm.elastic import ends
from mn_comm.elastic.change import Change, RankLost
from mn_comm.elastic.support import problem_of
from mn_comm.mpi import MPI

if TYPE_CHECKING:
    from mn_comm.context import Contexts
    from mn_comm.elastic.family import Family
    from mn_comm.gradients.reducer import GradientReducer
    from mn_comm.protocols import Model
    from mn_comm.strategies import Strategy

__all__ = ["ElasticCommunicator"]

_T = TypeVar("_T")
_UNABLE = ("pure_nccl",)
_MOST_ALARMS = 3
_COLLECTIVE = (
    *("bcast", "gather", "allgather", "scatter", "alltoall", "allreduce", "reduce", "reduce_scatter", "barrier"),
    *("bcast_obj", "gather_obj", "allgather_obj", "scatter_obj", "allreduce_obj", "multi_node_mean_grad"),
)
_POINT_TO_POINT = ("send", "recv", "send_obj", "recv_obj")


class _Progress:
    """Numbers that change in every step; as attributes of a communicator, they would be slow to set.

    Attributes:
        depth: The number of nested transactions that are running.
        alarms: How many times in a row MPI has failed although no rank was lost.
    """

    __slots__ = ("alarms", "depth")

    def __init__(self) -> None:
        self.depth = 0
        self.alarms = 0


class ElasticCommunicator(Communicator):
    """A communicator that continues without ranks that die.

    Everything happens in *transactions*, which end in a vote: either all ranks have completed the transaction, or a
    rank was lost. After a loss, the communicator is rebuilt from the remaining ranks, with new ranks and sizes. The
    transaction is repeated if possible; otherwise, :class:`RankLost` is raised on all remaining ranks. Each collective
    operation is a transaction, unless it is part of a larger one. The communicator must not be used by several threads
    at the same time.

    Args:
        mpi_comm: The ranks that take part. Creating a communicator is collective.
        strategy: How gradients are averaged: the name of a communicator.

    Raises:
        RuntimeError: The job cannot continue after a rank has died (on every rank).
        ValueError: The strategy cannot be elastic, or cannot work on these hosts.
    """

    strategy = "naive"
    is_elastic = True
    _averages_in_its_own_way = False

    def __init__(self, mpi_comm: MPI.Intracomm, strategy: str) -> None:
        from mn_comm.elastic.family import Family
        from mn_comm.ranks import Ranks

        if not isinstance(mpi_comm, MPI.Intracomm):
            raise TypeError(f"expected an mpi4py intracommunicator for mpi_comm, got {type(mpi_comm).__name__}")
        if strategy in _UNABLE:
            raise ValueError(f"expected a communicator that averages in host memory with elastic=True, got {strategy}")
        with agreement.raise_on_all(Ranks(mpi_comm)):
            problem = problem_of(MPI.Get_library_version())
            if problem is not None:
                raise RuntimeError(problem)
        self.strategy = strategy
        self._generation = -1
        self._progress = _Progress()
        self._on_change: list[Callable[[Change], object]] = []
        self._on_commit: list[Callable[[], object]] = []
        self._handed_out: list[tuple[weakref.ref[GradientReducer], bool]] = []
        self._renew(Family(mpi_comm))
        ends.end_alone(self)

    @property
    def generation(self) -> int:
        """How often the communicator has been rebuilt."""
        return self._generation

    @property
    def mpi_comm(self) -> MPI.Intracomm:
        """The mpi4py communicator of this generation; a different object after a loss."""
        return self._mpi_comm

    @mpi_comm.setter
    def mpi_comm(self, mpi_comm: MPI.Intracomm) -> NoReturn:
        raise RuntimeError("mpi_comm: an elastic communicator replaces it by itself, nobody else can")

    def on_change(self, callback: Callable[[Change], _T]) -> Callable[[Change], _T]:
        """Call a function after each loss, when the communicator has been rebuilt; register it on every rank.

        Args:
            callback: Called with the change, on every rank, in the order in which callbacks were registered. It may
                adapt values that depend on the number of ranks, such as a learning rate; it must not communicate.

        Returns:
            The function, so that this can be used as a decorator.
        """
        self._on_change.append(callback)
        return callback

    def on_commit(self, callback: Callable[[], _T]) -> Callable[[], _T]:
        """Register a function to be called after each step of an optimizer that all ranks have completed.

        Args:
            callback: Called on every rank; it must not communicate.

        Returns:
            The function, so that this can be used as a decorator.
        """
        self._on_commit.append(callback)
        return callback

    def transact(
        self,
        function: Callable[[], _T],
        *,
        repeat: bool = True,
        prepare: Callable[[], object] | None = None,
        is_step: bool = False,
        name: str = "transaction",
    ) -> _T:
        """Call a function that communicates, until all ranks have completed it; collective.

        Within another transaction, the function is a part of that transaction.

        Args:
            function: The function. If it raises an exception of its own, the transaction ends without a vote. So such
                an exception must be raised on all ranks, or end this rank.
            repeat: Whether the function can be called again after a loss.
            prepare: Called before the function is called again, when the communicator has been rebuilt.
            is_step: Whether this is a step of an optimizer, after which the functions registered by :meth:`on_commit`
                are called.
            name: Its name in messages.

        Returns:
            What the function returned.

        Raises:
            RankLost: A rank was lost, and the function cannot be repeated (on every remaining rank).
        """
        if self._progress.depth:
            return function()
        while True:
            try:
                result = self._attempt(function)
            except Exception as error:
                if not self._is_of_a_loss(error):
                    raise
                change = self._recover(error)
                if not repeat:
                    raise RankLost(name, change) from error
                if prepare is not None:
                    prepare()
            else:
                self._has_come_through(is_step)
                return result

    def _without_a_vote(self, function: Callable[[], _T], name: str) -> _T:
        if self._progress.depth:
            return function()
        try:
            return function()
        except Exception as error:
            if not self._is_of_a_loss(error):
                raise
            raise RankLost(name, self._recover(error)) from error

    def _has_come_through(self, is_step: bool) -> None:
        self._progress.alarms = 0
        if is_step:
            for callback in self._on_commit:
                callback()
        if ends.asked_to_leave.is_set():
            ends.leave_as_asked()

    def _attempt(self, function: Callable[[], _T]) -> _T:
        self._progress.depth += 1
        try:
            result = function()
        finally:
            self._progress.depth -= 1
        self._family.vote(approve=True)
        return result

    def _is_of_a_loss(self, error: Exception) -> bool:
        """Return whether an exception may be caused by a loss: any MPI exception may, whatever its class."""
        from mn_comm.elastic.family import Overruled

        return isinstance(error, (Overruled, MPI.Exception)) or self._family.is_revoked

    def _recover(self, error: Exception) -> Change:
        """Rebuild the communicator from the remaining ranks; collective among them."""
        began = time.monotonic()
        with spans.span("recover", generation=self._generation + 1):
            before = self._family
            before.give_up()
            self._abandon()
            self._renew(before)
        change = self._change_since(before, began)
        self._progress.alarms = 0 if change.lost else self._progress.alarms + 1
        if self._progress.alarms >= _MOST_ALARMS:
            raise RuntimeError(f"MPI failed {_MOST_ALARMS} times in turn, although no rank was lost") from error
        if self.rank == 0:
            _log(change)
        for callback in self._on_change:
            callback(change)
        return change

    def _change_since(self, before: Family, began: float) -> Change:
        from mn_comm.elastic.recovery import survivors

        alive = survivors(before, self._family)
        lost = tuple(sorted(set(range(before.base.size)) - set(alive)))
        return Change(self._generation, lost, alive, self.rank, time.monotonic() - began)

    def take_leave(self, *, at_once: bool) -> bool:
        """Leave the other ranks, which continue; return whether no rank does. This object must not be used afterwards.

        Args:
            at_once: Whether to interrupt ranks that wait for this rank.
        """
        from mn_comm.elastic.recovery import all_leave

        return all_leave(self._family, at_once=at_once)

    def _abandon(self) -> None:
        """End all work in the background: it fails, because the communicators are revoked."""
        for reducer, _ in self._reducers_handed_out():
            reducer.drain()
        self._contexts.abandon()

    def _renew(self, before: Family) -> None:
        """Shrink a family that was given up, and continue with the next one; collective among the remaining ranks."""
        from mn_comm.elastic.recovery import next_generation

        self._family, (contexts, strategy) = next_generation(before, self._build)
        self._generation += 1
        self._use(self._family.base, contexts, strategy)
        for reducer, is_background in self._reducers_handed_out():
            if is_background:
                context, worker = contexts.background
                reducer.use(self._strategy_on(context), worker)
            else:
                reducer.use(strategy, None)

    def _build(self, family: Family) -> tuple[Contexts, Strategy]:
        """Create everything that is derived from a new base; collective."""
        from mn_comm.context import Contexts

        contexts = Contexts(family.base)
        ranks = contexts.foreground.ranks
        if self._generation < 0:
            spans.start(ranks)
        # This must not depend on objects of this rank alone: ranks do not drop their last reference to a reducer at the
        # same time.
        if ranks.any(any(is_background for _, is_background in self._reducers_handed_out())):
            contexts.background  # noqa: B018 - made when first asked for
        return contexts, self._strategy_on(contexts.foreground)

    def _strategy_on(self, context: Any) -> Strategy:
        from mn_comm.strategies import Strategy

        return Strategy(self.strategy, context)

    def _reducers_handed_out(self) -> list[tuple[GradientReducer, bool]]:
        found = [(reference(), is_background) for reference, is_background in self._handed_out]
        return [(reducer, is_background) for reducer, is_background in found if reducer is not None]

    def gradient_reducer(self, **options: Any) -> GradientReducer:
        """Do what :meth:`CommunicatorBase.gradient_reducer` does.

        Raises:
            ValueError: ``compression`` or ``apart`` is given; a loss would leave them in an undefined state.
        """
        for name in ("compression", "apart"):
            if options.get(name):
                raise ValueError(f"expected {name} without elastic=True, got both: what it keeps is lost with a rank")
        # A weak reference to a bound method of super() would die immediately.
        reducer = self.transact(lambda: super(ElasticCommunicator, self).gradient_reducer(**options))
        self._handed_out.append((weakref.ref(reducer), bool(options.get("background"))))
        return reducer

    def bcast_data(self, model: Model) -> None:
        """Do what :meth:`CommunicatorBase.bcast_data` does; after a loss, repeat it from the new rank 0."""
        self.transact(partial(super().bcast_data, model))

    def split(self, color: int, key: int) -> NoReturn:
        """Refuse to split: the parts would not be rebuilt after a loss.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("split: an elastic communicator has no parts, as they would not survive a loss")


def _log(change: Change) -> None:
    import logging  # not at import: nothing else needs it

    logging.getLogger("mn_comm.elastic").warning("%s (%.0f ms)", change, 1000 * change.seconds)


def _as_transaction(name: str) -> Callable[..., Any]:
    method = getattr(Communicator, name)

    @wraps(method)
    def call(self: ElasticCommunicator, *args: Any, **kwargs: Any) -> Any:
        return self.transact(partial(method, self, *args, **kwargs), repeat=False, name=name)

    return call


def _between_two(name: str) -> Callable[..., Any]:
    """Return a method that ends without a vote, as only two ranks know of it; after a loss it joins a vote."""
    method = getattr(Communicator, name)

    @wraps(method)
    def call(self: ElasticCommunicator, *args: Any, **kwargs: Any) -> Any:
        return self._without_a_vote(partial(method, self, *args, **kwargs), name)

    return call


for _name in _COLLECTIVE:
    setattr(ElasticCommunicator, _name, _as_transaction(_name))
for _name in _POINT_TO_POINT:
    setattr(ElasticCommunicator, _name, _between_two(_name))
