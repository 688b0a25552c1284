"""The multi-node optimizer: backward, then average, then the actual optimizer's step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import chainer

from mn_comm import CommunicatorBase, is_elastic, span
from mn_comm.building_blocks import CompressionReport, Model
from mn_optim.commit import commit
from mn_optim.join import JoinParticipant
from mn_optim.schemes.scheme import Backward, Defer, Scheme, Stepper
from mn_optim.training_end import synchronize_at_the_end
from mn_optim.when import When, expect_when

__all__ = ["MultiNodeOptimizer"]

_OF_THE_STEPPER = ("actual_optimizer", "communicator", "target_params")


def _expect_optimizer(actual_optimizer: Any) -> None:
    if isinstance(actual_optimizer, type) or not (
        hasattr(actual_optimizer, "setup") and hasattr(actual_optimizer, "update")
    ):
        raise TypeError(
            "expected a chainer.Optimizer for actual_optimizer, or an object with setup, update and target; got "
            f"{type(actual_optimizer).__name__}: {actual_optimizer!r:.80}"
        )


class MultiNodeOptimizer:
    """A Chainer optimizer that trains replicas of a model on several ranks.

    All attributes except its own methods are those of the actual optimizer. A derived class in a script may override
    ``update``. Creating one is collective.

    Args:
        actual_optimizer: A Chainer optimizer, already set up or not; or any object with its ``setup``, ``update`` and
            ``target``.
        communicator: The ranks that train replicas of the same model.
        when: When ranks communicate, and what they send: :class:`AfterBackward`, :class:`DuringBackward`,
            :class:`OneStepLate`, :class:`LocalSGD`, :class:`DiLoCo`, :class:`StreamingDiLoCo` or
            :class:`Asynchronous`, or two of them, one after the other: :class:`SynchronousFirst`. A synchronous one may
            be in a :class:`Sharded`. A bool stands for ``AfterBackward(zero_fill)``, as in ChainerMN 7.

    Attributes:
        actual_optimizer: The optimizer.
        communicator: The ranks.
        target_params: The names of the parameters, and whether each was initialised, as ``is_changed`` last saw
            them.

    Raises:
        TypeError: ``actual_optimizer`` is not an optimizer; or ``when`` is of another type on some rank.
        ValueError: On every rank: the ranks' values of ``when`` differ; or ``when`` cannot be used with an elastic
            communicator, or its compression not with this communicator.
        NotImplementedError: The script uses its own class of communicator, which does not support ``when``.
        RuntimeError: ``when`` communicates in the background, but MPI was initialised without
            ``MPI_THREAD_MULTIPLE``.

    Example:
        >>> adam = chainer.optimizers.Adam()
        >>> from chainermn.optimizers import DuringBackward, MultiNodeOptimizer
        >>> optimizer = MultiNodeOptimizer(adam, comm, when=DuringBackward())
    """

    __slots__ = ("__weakref__", "_accumulates", "_commits", "_participant", "_stepper")

    actual_optimizer: chainer.Optimizer
    communicator: CommunicatorBase
    target_params: list[tuple[str, bool]]

    def __init__(
        self, actual_optimizer: chainer.Optimizer, communicator: CommunicatorBase, when: When | bool = True
    ) -> None:
        _expect_optimizer(actual_optimizer)
        scheme = expect_when(communicator, when).start(communicator, actual_optimizer)
        if scheme.may_diverge:
            synchronize_at_the_end(MultiNodeOptimizer)
        self._stepper = Stepper(actual_optimizer, communicator, scheme)
        self._participant: JoinParticipant | None = None
        self._accumulates = False
        self._commits = is_elastic(communicator)
        if self._commits:
            communicator.on_change(weakref.WeakMethod(scheme.restart_after_loss))  # type: ignore[attr-defined]

    @property
    def zero_fill(self) -> bool:
        """Whether an initialised parameter without a gradient counts as one of zeros."""
        return self._stepper.scheme.zero_fill

    @property
    def compression_report(self) -> CompressionReport | None:
        """The effect of compression in the last step on this rank; ``None`` without compression.

        With local steps, nothing is sent in a step without a meeting.
        """
        return self._stepper.scheme.compression_report

    def setup(self, link: chainer.Link) -> MultiNodeOptimizer:
        """Set the model whose parameters are to be optimised, and return this optimizer."""
        self.actual_optimizer.setup(link)
        return self

    def update(self, lossfun: Callable[..., chainer.Variable] | None = None, *args: Any, **kwds: Any) -> None:
        """Average the gradients over all ranks and update the parameters; collective.

        The first call only distributes the parameters of rank 0 to all ranks, and does not update them. So does the
        first call after parameters were added, renamed or initialised, or after ``setup`` with other parameters of the
        same names.

        Args:
            lossfun: The function that computes the loss, for which gradients are then computed; ``None`` if the
                gradients have been computed already.
            args: Passed to ``lossfun``, and to the actual optimizer's ``update`` after ``None``.
            kwds: Keyword arguments, passed in the same way.

        Raises:
            RuntimeError: No model was set up.
            ValueError: The ranks' models or gradients differ in names, shapes or dtypes (on every rank).
        """
        model = self._stepper.model("the first update")
        with span("step"):
            if self._participant is not None:
                self._participant.begin(model, lossfun, args, kwds, self._accumulates)
            forward = None if lossfun is None else partial(lossfun, *args, **kwds)
            # The arguments are passed to the actual optimizer, as in ChainerMN 7: a script's own optimizer may use
            # them.
            step = partial(self.actual_optimizer.update, None, *args, **kwds)
            attempt = partial(self._average_and_step, model, forward, step)
            if self._commits and not self._accumulates:
                commit(self._stepper, model, attempt, can_repeat=forward is not None)
            else:
                attempt()

    def _average_and_step(
        self,
        model: chainer.Link,
        forward: Callable[[], chainer.Variable] | None,
        step: Callable[[], None],
        defer: Defer | None = None,
    ) -> None:
        stepper = self._stepper
        backward = None
        if forward is not None:
            with span("forward"):
                loss = forward()
            backward = stepper.backward_from(model, loss)
            del loss  # the backward pass frees the graph before the gradients are averaged
        if self._accumulates:
            _run(backward)
            stepper.has_part = True
            return
        stepper.has_part = False
        if stepper.is_changed(model):
            self._start_equal(model, backward)
        else:
            if self._participant is not None:
                self._participant.go_on(model)
            stepper.step(model, backward, step, defer)
            if stepper.scheme.may_diverge:
                chainer.report({"meeting": float(self.is_meeting)})

    def _start_equal(self, model: chainer.Link, backward: Backward | None) -> None:
        """Distribute the parameters of rank 0 instead of taking a step; collective."""
        self._stepper.target_params = []  # after an exception they still have to be distributed
        if self._participant is None:
            _run(backward)
        else:
            self._participant.ask_for_parameters(model, backward)
        self._stepper.share_out(model)

    @contextmanager
    def no_sync(self, discard: bool = False) -> Iterator[None]:
        """Return a context in which ``update`` only adds up gradients: no communication, and no step.

        The first ``update`` after the context adds its own gradients, averages the sum and takes a step, so that k
        parts of a mini-batch need only one communication::

            with optimizer.no_sync():
                for part in parts[:-1]:
                    optimizer.update(loss, part)
            optimizer.update(loss, parts[-1])

        Args:
            discard: Whether gradients that were added up before are discarded, for example those of a mini-batch that
                an exception has ended.
        """
        if discard:
            self._stepper.has_part = False
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    @contextmanager
    def join(self, over: str = "present") -> Iterator[None]:
        """Return a context in which ranks may call ``update`` different numbers of times: each as long as it has data.

        A rank that reaches the end of the block takes part in the updates of the others, with gradients of zeros, until
        all ranks have reached the end. Then all have the same parameters and the same number of steps::

            with optimizer.join():
                for batch in batches_of_this_rank:  # there may be none
                    optimizer.update(model, *batch)

        Entering the block is not collective; leaving it is. In the block, only ``update`` may communicate. If an
        exception leaves the block on one rank, the others are informed and raise as well, unless it occurs during the
        communication of an update. A rank without data uses the hyperparameters of the first rank that has data.

        Models that communicate, for example with ``MultiNodeBatchNormalization``, are run on ranks without data with a
        sample that does not count. For such models, ``update`` must be called with the loss function, and with arrays
        that have samples along their first axis.

        Args:
            over: The ranks to average over: ``"present"`` for the ranks that still have data, ``"all"`` for all ranks.

        Raises:
            RuntimeError: No model was set up; or one join is within another; or another rank has left the block because
                of an exception, or has never entered it.
            ValueError: ``over`` is neither of these, or not the same on every rank (on every rank); or the optimizer
                was created with ``zero_fill=False``.
        """
        model = self._stepper.model("join")
        participant = self._join(over, is_lasting=False)
        try:
            yield
            participant.leave(model)
        except Exception as error:
            participant.fail(model, error)
            raise
        finally:
            self._participant = None
            self._stepper.scheme.use_join(None)

    def join_in_steps(self, over: str = "present") -> None:
        """Declare that from now on, every rank calls either ``update`` or :meth:`update_without_data` in each step.

        For updaters that do so. Call it on every rank; it ends at the next call of this method, or of :meth:`join`.

        Args:
            over: The ranks to average over, ``"present"`` or ``"all"``.

        Raises:
            RuntimeError: It is called within a :meth:`join`.
        """
        self._join(over, is_lasting=True)

    def _join(self, over: str, is_lasting: bool) -> JoinParticipant:
        if self._participant is not None and not self._participant.is_lasting:
            raise RuntimeError("expected one join at a time, got one within another")
        self._participant = JoinParticipant(self._stepper, over, is_lasting)
        return self._participant

    def update_without_data(self, lossfun: Callable[..., chainer.Variable] | None = None) -> None:
        """Take part in a step of other ranks without own data; collective with their ``update``.

        If no rank has data, none takes a step.

        Args:
            lossfun: The loss function that the other ranks pass to ``update``; called if the model communicates. By
                default the one that was passed last, or the model.

        Raises:
            RuntimeError: No model was set up, or :meth:`join_in_steps` was not called.
        """
        model = self._stepper.model("the first update")
        if self._participant is None:
            raise RuntimeError("expected join_in_steps() before an update without data")
        with span("step"):
            self._participant.stand_in(model, lossfun)

    def assume_synchronized(self) -> None:
        """Assume that the parameters of all ranks are equal already: the next update takes a step.

        Call it on every rank, after the same snapshot was loaded on all of them.
        """
        self._stepper.assume_synchronized()

    @property
    def is_meeting(self) -> bool:
        """Whether ranks exchanged data in the latest step; always true without local or asynchronous steps."""
        return self._stepper.scheme.is_meeting

    @property
    def share_of_meeting(self) -> float:
        """The share of the model that ranks exchange in a meeting; below 1 with several fragments."""
        return self._stepper.scheme.share_of_meeting

    @property
    def may_diverge(self) -> bool:
        """Whether the ranks' parameters may differ between two steps, with local or asynchronous steps."""
        return self._stepper.scheme.may_diverge

    def synchronize(self) -> None:
        """Make the parameters of all ranks equal, after local or asynchronous steps; collective.

        A rank that has called this takes part in the meetings of the others until all ranks have called it. It is
        called when Chainer's trainer ends; multi-node evaluators, checkpointers and snapshots call it before they
        begin. In your own training loop, call it before you evaluate or save, and at the end.

        Raises:
            RuntimeError: No model was set up; or another rank came to a different meeting (on every rank).
        """
        self._stepper.synchronize()

    def serialize(self, serializer: Any) -> None:
        """Save or load the state of the actual optimizer, of pending exchanges, and of compression.

        Not collective. Plain Chainer ignores the latter two; if they are missing, they count as empty. Sharded state is
        saved as if it were not sharded, after :meth:`consolidate`.

        Raises:
            RuntimeError: The state is sharded and is to be saved, without :meth:`consolidate` before.
        """
        scheme = self._stepper.scheme
        if self.actual_optimizer.target is not None:
            self._serialize_scheme(scheme, serializer)
        # After the scheme, which knows whether the state is sharded in its present phase.
        (scheme.shards or self.actual_optimizer).serialize(serializer)

    def _serialize_scheme(self, scheme: Scheme, serializer: Any) -> None:
        if isinstance(serializer, chainer.Serializer) and scheme.has_diverged:
            warnings.warn(
                f"the parameters of rank {self.communicator.rank} are saved while those of other ranks differ: call "
                "synchronize() on every rank before, or save by create_multi_node_checkpointer or multi_node_snapshot",
                RuntimeWarning,
                stacklevel=2,
            )
        scheme.serialize(serializer, self.actual_optimizer.target)

    def consolidate(self, to: int = 0) -> None:
        """Gather sharded state on one rank, which can save it until the next ``update``; collective.

        Without sharded state, this does nothing, so a script may call it before every snapshot::

            optimizer.consolidate()
            if comm.rank == 0:
                chainer.serializers.save_npz("optimizer.npz", optimizer)

        ``multi_node_snapshot`` calls it. The multi-node checkpointer does not need it: each rank saves its own part.

        Args:
            to: The rank on which to gather it, the same on every rank.

        Raises:
            RuntimeError: No model was set up.
            ValueError: ``to`` is not a rank, or ranks pass different ones, or have not loaded state equally often (on
                every rank).
        """
        self._stepper.model("consolidate")
        shards = self._stepper.scheme.shards
        if shards is not None:
            shards.consolidate(to)

    def own_part(self) -> AbstractContextManager[None]:
        """Return a context in which :meth:`serialize` saves only this rank's part of sharded state.

        For checkpoints of all ranks together; they can be loaded only by the same number of ranks.
        """
        shards = self._stepper.scheme.shards
        return nullcontext() if shards is None else shards.own_part()

    def is_changed(self, target: Model) -> bool:
        """Return whether the names of a model's parameters, or which are initialised, differ from the last call.

        The first call returns ``True`` for any model that has parameters.
        """
        return self._stepper.is_changed(target)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *_OF_THE_STEPPER, *dir(self._stepper.actual_optimizer)})

    def __getattr__(self, name: str) -> Any:
        if name in MultiNodeOptimizer.__slots__:  # not set yet: while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self._stepper if name in _OF_THE_STEPPER else self._stepper.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in MultiNodeOptimizer.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._stepper if name in _OF_THE_STEPPER else self._stepper.actual_optimizer, name, value)


def _run(backward: Backward | None) -> None:
    if backward is not None:
        backward(None)
