"""The multi-node optimizer: backward, then average, then the actual optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import chainer

from mn_comm import CommunicatorBase, is_elastic, span
from mn_optim.commit import commit
from mn_optim.join import JoinParticipant
from mn_optim.schemes.scheme import Backward, Defer, Stepper
from mn_optim.training_end import synchronize_at_the_end
from mn_optim.when import When, expect_when
from mn_optim.wrapper import OptimizerWrapper, expect_optimizer


class MultiNodeOptimizer(OptimizerWrapper):
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
        target_params: The names of the parameters, and whether each was initialised, as ``is_changed`` last saw them.

    Raises:
        TypeError: ``actual_optimizer`` is not an optimizer; or ``when`` is of another type on some rank.
        ValueError: On every rank: the ranks' values of ``when`` differ; or ``when`` cannot be used with an elastic
            communicator, or its compression not with this communicator.
        NotImplementedError: The script uses its own class of communicator, which does not support ``when``.
        RuntimeError: ``when`` communicates in the background, but MPI was initialised without ``MPI_THREAD_MULTIPLE``.

    Example:
        >>> adam = chainer.optimizers.Adam()
        >>> from chainermn.optimizers import DuringBackward, MultiNodeOptimizer
        >>> optimizer = MultiNodeOptimizer(adam, comm, when=DuringBackward())
    """

    __slots__ = ()

    def __init__(
        self, actual_optimizer: chainer.Optimizer, communicator: CommunicatorBase, when: When | bool = True
    ) -> None:
        expect_optimizer(actual_optimizer)
        scheme = expect_when(communicator, when).start(communicator, actual_optimizer)
        if scheme.may_diverge:
            synchronize_at_the_end(MultiNodeOptimizer)
        self._stepper = Stepper(actual_optimizer, communicator, scheme)
        self._participant: JoinParticipant | None = None
        self._accumulates = False
        self._commits = is_elastic(communicator)
        if self._commits:
            communicator.on_change(weakref.WeakMethod(scheme.restart_after_loss))  # type: ignore[attr-defined]

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
            # It gets the arguments, too, as in ChainerMN 7: a script's own optimizer may use them.
            step = partial(self._stepper.actual_optimizer.update, None, *args, **kwds)
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
            if backward is not None:
                backward(None)
            stepper.has_part = True
            return
        stepper.has_part = False
        if stepper.needs_sharing(model):
            self._start_equal(model, backward)
        else:
            if self._participant is not None:
                self._participant.go_on(model)
            stepper.step(model, backward, step, defer)
            if stepper.scheme.may_diverge:
                chainer.report({"meeting": float(stepper.scheme.is_meeting)})

    def _start_equal(self, model: chainer.Link, backward: Backward | None) -> None:
        """Distribute the parameters of rank 0 instead of taking a step; collective."""
        if self._participant is not None:
            self._participant.ask_for_parameters(model, backward)
        elif backward is not None:
            backward(None)
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
