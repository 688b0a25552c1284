"""The elastic communicator: one object for the whole training, which rebuilds itself when a rank is lost."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mn_comm.basis import wire
from mn_comm.basis.change import Change, RankLost
from mn_comm.basis.lazy import load_later
from mn_comm.basis.mpi import MPI
from mn_comm.communicator import Communicator
from mn_comm.gradients.strategies import STRATEGIES, Strategy
from mn_comm.ranks import agreement, spans
from mn_elastic import ends, support
from mn_elastic.callbacks import Callbacks
from mn_elastic.support import SPARES

if TYPE_CHECKING:
    from mn_comm.basis.protocols import Model
    from mn_comm.gradients.reducer import GradientReducer
    from mn_comm.ranks.context import Contexts
    from mn_elastic import recovery, spares
    from mn_elastic.family import Family
else:  # loading them starts MPI
    recovery, spares = load_later("mn_elastic.recovery"), load_later("mn_elastic.spares")

_T = TypeVar("_T")
_MOST_ALARMS = 3
_TORN = (
    "an exception, for example of a signal handler of the script, has left the middle of a vote or a recovery: this "
    "rank cannot take part in anything any more, and should end"
)
_COLLECTIVE = (
    *("bcast", "gather", "allgather", "scatter", "alltoall", "allreduce", "reduce", "reduce_scatter", "barrier"),
    *("bcast_obj", "gather_obj", "allgather_obj", "scatter_obj", "allreduce_obj", "multi_node_mean_grad"),
)
_POINT_TO_POINT = ("send", "recv", "send_obj", "recv_obj")


@dataclass(slots=True)
class _Progress:
    """State that transactions read and change; as attributes of a communicator, it would be slow to set.

    Attributes:
        depth: The number of nested transactions that are running.
        alarms: How many times in a row MPI has failed although no rank was lost.
        no_steps: Why no step can be taken now; empty if one can.
        nothing: Why no transaction at all is possible now; empty if one is.
    """

    depth: int = 0
    alarms: int = 0
    no_steps: str = ""
    nothing: str = ""

    def check(self, is_step: bool) -> None:
        """Raise RuntimeError if a transaction, which may be a step, is not possible now."""
        problem = self.nothing or (is_step and self.no_steps)
        if problem:
            raise RuntimeError(problem)


class ElasticCommunicator(Communicator):
    """A communicator that continues without ranks that die.

    Everything happens in *transactions*, which end in a vote: either all ranks have completed the transaction, or a
    rank was lost. After a loss, the communicator is rebuilt from the remaining ranks, with new ranks and sizes. The
    transaction is repeated if possible; otherwise, :class:`RankLost` is raised on all remaining ranks. Each collective
    operation is a transaction, unless it is part of a larger one. The communicator must not be used by several threads
    at the same time.

    With spares (``CHAINERMN_SPARES``), all processes are ranks until they call ``maybe_load`` of a memory keeper.
    So spares take part in the set-up of the script.

    Args:
        mpi_comm: The ranks that take part. Creating a communicator is collective.
        strategy: How gradients are averaged: the name of a communicator.

    Raises:
        RuntimeError: The job cannot continue after a rank has died (on every rank).
        ValueError: The strategy cannot be elastic, or cannot work on these hosts; the requested number of spares is not
            possible; these are not all ranks of the job; or there is an elastic communicator already.
    """

    strategy = "naive"
    is_elastic = True
    _averages_in_its_own_way = False

    def __init__(self, mpi_comm: MPI.Intracomm, strategy: str) -> None:
        from mn_comm.ranks.intracomm import Ranks
        from mn_elastic.family import Family

        wire.check_intracomm(mpi_comm)
        if not STRATEGIES[strategy].on_host:
            raise ValueError(f"expected a communicator that averages in host memory with elastic=True, got {strategy}")
        if ends.is_shared():
            raise ValueError(
                "expected one elastic communicator in a job, got another one: use the first one in all places"
            )
        ranks = Ranks(mpi_comm)
        with agreement.raise_on_all(ranks):
            problem = support.problem_of(MPI.Get_library_version())
            if problem is not None:
                raise RuntimeError(problem)
            if ranks.size < MPI.COMM_WORLD.size:  # the launcher and MPI_Finalize know only of all of them
                raise ValueError(
                    f"expected all {MPI.COMM_WORLD.size} processes of the job with elastic=True, got {ranks.size}: "
                    "start a job for each part"
                )
        # From rank 0's environment: Open MPI's launcher passes a variable only to the ranks on its own host.
        n_spares = support.n_spares(ranks.size, ranks.bcast(os.environ.get(SPARES, "")))
        self.strategy = strategy
        self._generation = -1
        self._progress = _Progress()
        self._on_change = Callbacks()
        self._on_commit = Callbacks()
        # Whether each communicates in the background.
        self._handed_out: weakref.WeakKeyDictionary[GradientReducer, bool] = weakref.WeakKeyDictionary()
        self._places = ranks.size - n_spares
        self._pool: spares.Pool | None = None
        self._waits = False
        self._is_over = False
        self._has_failed = False
        self._is_within = False  # whether the ranks are recovering, or taking leave
        self._is_in_step = False  # whether the ranks are in a transaction, also if this one has left it by an exception
        self._all_left: bool | None = None  # known once this rank has taken leave
        self._go_on(*recovery.next_generation(Family(mpi_comm), self._build))
        if n_spares:
            self._progress.no_steps = (
                f"{SPARES}={n_spares}: expected keeper.maybe_load(trainer) before the first step, for a keeper "
                "of chainermn.extensions.create_memory_keeper(comm): that is where spares wait"
            )
        ends.end_alone(self)

    @property
    def generation(self) -> int:
        """How often the communicator has been rebuilt."""
        return self._generation

    @property
    def has_lost(self) -> bool:
        """Whether a rank was lost or ends by a failure, as far as this rank knows."""
        return self._generation > 0 or self._has_failed or self._family.has_dead_ranks

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
                adapt values that depend on the number of ranks, such as a learning rate; it must not communicate. An
                exception of it, raised here after all callbacks were called, should end the rank: the other ranks may
                have none, and continue. A ``weakref.WeakMethod`` does not keep its object alive, and is called as long
                as that exists.

        Returns:
            The function, so that this can be used as a decorator.
        """
        self._on_change.add(callback)
        return callback

    def on_commit(self, callback: Callable[[], _T]) -> Callable[[], _T]:
        """Register a function to be called after each step of an optimizer that all ranks have completed.

        Args:
            callback: Called on every rank; it must not communicate. It may be a ``weakref.WeakMethod``, too.

        Returns:
            The function, so that this can be used as a decorator.
        """
        self._on_commit.add(callback)
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
            RuntimeError: Spares were not set aside before the first step (on every rank). Or this rank was a spare, and
                makes a call that the other ranks made before it joined them. Or an exception, such as that of a signal
                handler, has left a vote or a recovery on this rank.
        """
        if self._progress.depth:
            return function()
        self._progress.check(is_step)
        result = self._despite_losses(partial(self._attempt, function), name, repeat, prepare)
        self._progress.alarms = 0
        if is_step:
            self._on_commit()
        if ends.asked_to_leave.is_set():
            ends.leave_as_asked()
        return result

    def _despite_losses(
        self, attempt: Callable[[], _T], name: str, repeat: bool = True, prepare: Callable[[], object] | None = None
    ) -> _T:
        """Return the result of a function, and recover from losses meanwhile; see :meth:`transact` for arguments."""
        if self._is_over:  # a spare that was not needed still communicates while it ends: in a ``finally`` block
            raise SystemExit(0)
        if self.is_torn:
            raise RuntimeError(_TORN)
        while True:
            try:
                return attempt()
            except Exception as error:
                if not self._is_of_a_loss(error):
                    raise
                change = self._recover(error)
                if not repeat:
                    raise RankLost(name, change) from error
                if prepare is not None:
                    prepare()

    def _attempt(self, function: Callable[[], _T]) -> _T:
        self._progress.depth += 1
        self._is_in_step = True
        try:
            result = function()
        finally:
            self._progress.depth -= 1
        self._is_in_step = False
        self._family.vote(approve=True)
        return result

    def _is_of_a_loss(self, error: Exception) -> bool:
        """Return whether an exception may be caused by a loss: any of MPI's may, and any at all after a loss."""
        from mn_elastic.family import Overruled

        is_own = error is self._family.interruption
        return not is_own and (isinstance(error, (Overruled, MPI.Exception)) or self._family.is_broken)

    def _recover(self, error: Exception) -> Change:
        """Rebuild the communicator from the remaining ranks; collective among them."""
        began = time.monotonic()
        with spans.span("recover", generation=self._generation + 1):
            self._is_within = True
            before = self._give_up()
            self._go_on(*recovery.next_generation(before, self._build))
            self._is_within = False
        change = self._change_since(before, began)
        self._expect_majority(change)
        self._progress.alarms = 0 if change.lost else self._progress.alarms + 1
        if self._progress.alarms >= _MOST_ALARMS:
            raise RuntimeError(f"MPI failed {_MOST_ALARMS} times in a row, although no rank was lost") from error
        self._tell(change)
        return change

    def _expect_majority(self, change: Change) -> None:
        left = len(change.survivors) + len(change.set_aside)
        if support.is_minority(left, change.old_size):
            ends.end_as_minority(left, change.old_size)

    def _tell(self, change: Change) -> None:
        if self.rank == 0:
            import logging  # not at import: nothing else needs it

            logging.getLogger("mn_elastic").warning("%s (%.0f ms)", change, 1000 * change.seconds)
        before, self._progress.nothing = self._progress.nothing, "expected a function of on_change not to communicate"
        try:
            self._on_change(change)
        finally:
            self._progress.nothing = before

    def _change_since(self, before: Family, began: float, mustered: spares.Mustered | None = None) -> Change:
        alive = recovery.survivors(before.base, self._family.base)
        gone = set(range(before.base.size)) - set(alive)
        aside: set[int] = set()
        newcomers: tuple[str, ...] = ()
        if mustered is not None and self._pool is not None:
            aside = gone & set(recovery.survivors(before.base, self._pool.family.base))
            present = recovery.survivors(mustered.base, self._family.base)
            names = dict(enumerate(mustered.newcomers, mustered.base.size - len(mustered.newcomers)))
            newcomers = tuple(names[each] for each in present if each in names) if len(alive) < self.size else ()
        lost, seconds = tuple(sorted(gone - aside)), time.monotonic() - began
        return Change(self._generation, lost, alive, self.rank, seconds, tuple(sorted(aside)), newcomers)

    @property
    def places(self) -> int:
        """How many ranks train; if there are more, the others will wait as spares."""
        return min(self._places, self.size)

    @property
    def has_spares(self) -> bool:
        """Whether processes have been set aside by :meth:`take_places`; the same on every rank."""
        return self._pool is not None

    @property
    def lacks_ranks(self) -> bool:
        """Whether ranks were lost, and spares can take their places; the same on every rank."""
        return self._pool is not None and self._pool.waiting > 0 and self.size < self._places

    def take_places(self) -> bool:
        """Set aside the spares, which wait in this call until they are needed; collective.

        Without spares, this does nothing. A spare that is never needed ends here, with status 0, when the job ends.

        Returns:
            Whether this process has waited, and now takes the place of a lost rank. It is then one of the last ranks.
        """
        if not self._progress.no_steps:
            return False
        self._meet()
        self._progress.no_steps = ""
        self._pool = spares.Pool(self._family, self._places)
        if self._muster(self._pool):
            return False
        self._wait(self._pool)
        return True

    def fill_places(self) -> None:
        """Let spares take the places of lost ranks, if there are any; collective, between two steps.

        The spares return from :meth:`take_places`, and become the last ranks. This sends them no state. If a rank is
        lost meanwhile, :attr:`lacks_ranks` stays true. This can then be called again, but only when all ranks have
        reached the same point of the program.
        """
        if self._pool is not None and self.lacks_ranks:
            self._meet()
            self._muster(self._pool)

    def catch_up(self, until: str) -> None:
        """Refuse transactions on a rank that has joined, until it has reached the same point as the other ranks.

        Args:
            until: The name, in messages, of the call that must come after everything else that communicates; empty if
                the rank has reached the same point.
        """
        self._progress.nothing = until and (
            f"expected all that communicates before {until}, in a script that has spares: the other ranks have done it "
            "long before this one joined them"
        )

    @property
    def is_catching_up(self) -> bool:
        """Whether this rank has joined, but has not yet reached the same point as the other ranks."""
        return bool(self._progress.nothing)

    def _meet(self) -> None:
        """Wait until all ranks have called this; collective."""
        if self._progress.depth:
            raise RuntimeError("expected spares to be called between two transactions, got a call within one")
        self._despite_losses(lambda: self._attempt(lambda: None), "spares")

    def _muster(self, pool: spares.Pool) -> bool:
        """Decide which processes train, and continue with these; return whether this one trains; collective."""
        began = time.monotonic()
        with spans.span("muster", generation=self._generation + 1):
            self._is_within = True
            before = self._give_up()
            mustered = pool.muster(self.rank, self._generation)
            assert mustered is not None  # this process is not leaving
            if mustered.is_called:
                self._expect_majority(self._begin(mustered, before, began))
            else:
                self._generation += 1  # the communicator was rebuilt without this process
                self._waits, self._is_within = True, False
        return mustered.is_called

    def _wait(self, pool: spares.Pool) -> None:
        """Wait until this process is called, or end it if it never is."""
        before = self._family
        while self._waits:
            pool.wait()
            began = time.monotonic()
            self._is_within = True
            mustered = None if pool.is_abandoned else pool.muster(-1, -1)
            if mustered is None:
                self._is_over, self._is_within = True, False
                ends.end_as_spare(in_vain=pool.is_abandoned)
            elif mustered.is_called:
                self._waits = False
                self._begin(mustered, before, began)
            self._is_within = False

    def _begin(self, mustered: spares.Mustered, before: Family, began: float) -> Change:
        self._generation = mustered.generation
        self._go_on(*recovery.first_generation(mustered.base, self._build))
        self._is_within = False
        change = self._change_since(before, began, mustered)
        self._tell(change)
        return change

    @property
    def is_torn(self) -> bool:
        """Whether an exception has left the middle of something that the ranks do together: this one must die."""
        return self._is_within or self._family.is_torn

    def take_leave(self, *, at_once: bool) -> bool:
        """Leave the other ranks, which continue; return whether no rank does. This object must not be used afterwards.

        Args:
            at_once: Whether to interrupt ranks that wait for this rank, because it has failed.
        """
        if self._is_over or self._waits:
            # If the job has failed, its other processes have its exit status, and nobody may report success.
            return self._is_over and not (self._pool is not None and self._pool.family.has_failed)
        if self._all_left is None:  # otherwise, something has failed afterwards
            self._is_within = True
            # A rank that leaves a transaction in the middle, for example by SystemExit, does not let the others wait.
            all_left, self._has_failed = recovery.all_leave(
                self._family, at_once=at_once or self._is_in_step, failed=at_once
            )
            if all_left and self._pool is not None:
                self._pool.dismiss(failed=at_once)
            self._all_left, self._is_within = all_left, False
        return self._all_left

    def interrupt(self) -> None:
        """Make operations fail in which ranks wait for one that has left: they recover without it."""
        if not self._is_over:
            self._family.revoke()

    def _give_up(self) -> Family:
        """Give up the family, and return it; end all work in the background, which fails: the family is revoked."""
        self._family.give_up()
        for reducer in list(self._handed_out):
            reducer.drain()
        self._contexts.abandon()
        return self._family

    def _go_on(self, family: Family, built: tuple[Contexts, Strategy]) -> None:
        self._family, (contexts, strategy) = family, built
        self._generation += 1
        self._use(self._family.base, contexts, strategy)
        for reducer, is_background in list(self._handed_out.items()):
            if is_background:
                context, worker = contexts.background
                reducer.use(STRATEGIES[self.strategy](context), worker)
            else:
                reducer.use(strategy, None)

    def _build(self, family: Family) -> tuple[Contexts, Strategy]:
        """Create everything that is derived from a new base; collective."""
        from mn_comm.ranks.context import Contexts

        contexts = Contexts(family.base)
        ranks = contexts.foreground.ranks
        if self._generation < 0:
            spans.start(ranks)
        # This must not depend on objects of this rank alone: ranks do not drop their last reference to a reducer at the
        # same time.
        if ranks.any(any(self._handed_out.values())):
            contexts.background  # noqa: B018 - created on first access
        return contexts, STRATEGIES[self.strategy](contexts.foreground)

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
        self._handed_out[reducer] = bool(options.get("background"))
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


def create(mpi_comm: MPI.Intracomm, kind: type[Communicator]) -> ElasticCommunicator:
    """Create a communicator that averages as a class does, and continues without ranks that die; collective.

    Args:
        mpi_comm: The ranks.
        kind: A class of communicators, of this package or of another one.
    """
    return elastic_kind(kind)(mpi_comm, kind.strategy)


def elastic_kind(kind: type[Communicator]) -> type[ElasticCommunicator]:
    """Return the class of elastic communicators that average as another class does.

    Args:
        kind: A class of communicators, of this package or of another one.

    Raises:
        ValueError: It replaces methods that an elastic communicator needs.
    """
    bases = kind.__mro__[: kind.__mro__.index(Communicator)]
    own = {name for base in bases for name in vars(base) if not name.startswith("__")} - {"strategy", "_abc_impl"}
    if not own:
        return ElasticCommunicator
    replaced = sorted(name for name in own - {"comm_hook"} if hasattr(ElasticCommunicator, name))
    if replaced or any("__init__" in vars(base) for base in bases):
        raise ValueError(
            f"expected a communicator with only strategy, comm_hook and names of its own, with elastic=True, got "
            f"{kind.__name__}, which replaces {', '.join(replaced or ['__init__'])}"
        )
    return type(f"Elastic{kind.__name__}", (ElasticCommunicator, kind), {"__doc__": kind.__doc__})


def _surviving(name: str) -> Callable[..., Any]:
    """Return an operation of a communicator as a transaction, or one between two ranks without a vote."""
    method = getattr(Communicator, name)

    @wraps(method)
    def call(self: ElasticCommunicator, *args: Any, **kwargs: Any) -> Any:
        function = partial(method, self, *args, **kwargs)
        if name in _COLLECTIVE:
            return self.transact(function, repeat=False, name=name)
        # Only two ranks know of it, so that it cannot end in a vote; after a loss, this rank joins one.
        return function() if self._progress.depth else self._despite_losses(function, name, repeat=False)

    return call


for _name in (*_COLLECTIVE, *_POINT_TO_POINT):
    setattr(ElasticCommunicator, _name, _surviving(_name))
