"""The multi-node optimizer: backward, then average, then the actual optimizer's step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import chainer

from mn_comm import (
    CommunicationHook,
    CommunicatorBase,
    Compression,
    CompressionReport,
    GradientReducer,
    Model,
    expect_same,
    is_elastic,
    own,
    raise_on_all,
    span,
)
from mn_optim.backward import backward as overlapping_backward
from mn_optim.commit import Defer, Forward, commit, refuse_elastic, restart_after_losses
from mn_optim.compression_state import serialize_compression
from mn_optim.join import JoinParticipant, joined
from mn_optim.options import (
    Asynchronous,
    DiLoCo,
    LocalSGD,
    StreamingDiLoCo,
    as_asynchronous,
    as_local_steps,
    describe,
)
from mn_optim.schemes import (
    AfterBackward,
    AsynchronousMean,
    Backward,
    DoubleBuffered,
    LocalSteps,
    Overlapped,
    Scheme,
    Sharded,
    Synchronous,
)
from mn_optim.schemes.shared import share_out
from mn_optim.sharding import Shards
from mn_optim.training_end import synchronize_at_the_end

__all__ = ["MultiNodeOptimizer", "create_multi_node_optimizer"]

_BUCKET_BYTES = 4 * 1024 * 1024


def create_multi_node_optimizer(
    actual_optimizer: chainer.Optimizer,
    communicator: CommunicatorBase,
    double_buffering: bool = False,
    zero_fill: bool = True,
    *,
    overlap: bool = False,
    bucket_bytes: int = _BUCKET_BYTES,
    comm_hook: CommunicationHook | None = None,
    compression: Compression | None = None,
    local_steps: int | LocalSGD | DiLoCo | StreamingDiLoCo | None = None,
    asynchronous: bool | Asynchronous = False,
    shard_state: bool = False,
) -> MultiNodeOptimizer:
    """Make an optimizer average its gradients over all ranks before each step, or let ranks communicate less often.

    If any option differs from its default, this is collective: every rank must call it.

    Args:
        actual_optimizer: A Chainer optimizer, already set up or not; or any object with its ``setup``, ``update`` and
            ``target``.
        communicator: The ranks that train replicas of the same model.
        double_buffering: Whether each step applies the averaged gradients of the previous step, while its own gradients
            are averaged in the background.
        zero_fill: Whether the missing gradient of an initialised parameter counts as zeros. Otherwise it is omitted
            from the average, and must be missing on every rank.
        overlap: Whether gradients are averaged during the backward pass, those of the last layers first, if ``update``
            is called with the loss function. The result is equal, bit for bit, to averaging the same buckets after the
            backward pass.
        bucket_bytes: With ``overlap``, how many bytes of gradients are sent together, unless a single gradient is
            larger.
        comm_hook: A function that gets each bucket of gradients (``index``, ``names``, ``shapes``, and ``flat``, the
            concatenated gradients) and returns a :class:`mn_comm.Future` of their mean. The default is
            ``bucket.average()``. It corresponds to ``register_comm_hook`` of PyTorch's ``DistributedDataParallel``.
        compression: How gradients are compressed between nodes, or between the ranks of a single node: ``Int8()``,
            ``TopK()``, ``PowerSGD()`` or ``OneBit()`` of :mod:`mn_compress`. The part that has not been sent
            yet is saved with the optimizer, on each rank. Synchronous first steps (``start_after``) are not compressed.
            With ``local_steps``, the changes of the parameters since the last meeting are compressed.
        local_steps: How many steps each rank takes on its own before all ranks continue from the mean of their
            parameters; or an object of :class:`LocalSGD`, :class:`DiLoCo` or :class:`StreamingDiLoCo`, with more
            options.
        asynchronous: Whether parameters are averaged in the background while each rank trains at its own speed; or an
            object of :class:`Asynchronous`, with more options.
        shard_state: Whether each parameter is updated by only one rank, which alone has the optimizer's state for it
            and sends the updated parameter to all others (ZeRO-1). The result is the same, bit for bit. Hooks for
            single parameters that come before the update run on the rank that updates the parameter, unless there is
            also a hook over all parameters before the update. Before one rank saves the optimizer, every rank calls
            :meth:`MultiNodeOptimizer.consolidate`.

    Returns:
        The multi-node optimizer. All attributes except its own methods are those of ``actual_optimizer``.

    Raises:
        TypeError: ``actual_optimizer`` is not an optimizer.
            On every rank: ``local_steps``, ``asynchronous`` or ``compression`` is of a wrong type on some rank.
        ValueError: Options exclude each other; or ``overlap`` is used without ``zero_fill``. On every rank: there are
            fewer than 1 local steps; the ranks' options differ; ``compression`` is used together with ``comm_hook`` or
            ``asynchronous``, or with the communicator ``naive``; or ``shard_state`` is used together with
            ``local_steps`` or ``asynchronous``.
        NotImplementedError: The script uses its own class of communicator, which does not support an option.
        RuntimeError: An option communicates in the background, but MPI was initialised without
            ``MPI_THREAD_MULTIPLE``.
    """
    _expect_optimizer(actual_optimizer)
    if overlap and double_buffering:
        raise ValueError("expected one of overlap and double_buffering, got both")
    if overlap and not zero_fill:
        # When the first gradients are sent, it is not known yet which other gradients will follow.
        raise ValueError("expected zero_fill=True with overlap, got False")
    scheme: Scheme
    reducer = None
    hooks = _given(comm_hook=comm_hook, compression=compression)
    if local_steps is not None or asynchronous is not False:
        refuse_elastic(communicator, "local_steps" if local_steps is not None else "asynchronous")
        with raise_on_all(communicator):
            others = {"overlap": overlap, "double_buffering": double_buffering, "shard_state": shard_state}
            _expect_alone(local_steps, asynchronous, others, hooks)
            options = as_asynchronous(asynchronous) if local_steps is None else as_local_steps(local_steps)
        expect_same(communicator, "local_steps and asynchronous", describe(options))
        expect_same(communicator, "use of comm_hook and compression", sorted(hooks))
        exact = AfterBackward(communicator, zero_fill, None)
        if isinstance(options, Asynchronous):
            scheme = AsynchronousMean(communicator, options, exact)
        else:
            scheme = LocalSteps(communicator, options, exact, comm_hook, compression)
        synchronize_at_the_end(MultiNodeOptimizer)
    elif overlap:
        reducer = communicator.gradient_reducer(background=True, bucket_bytes=bucket_bytes, **hooks)
        scheme = Overlapped(communicator, reducer)
    elif double_buffering:
        reducer = communicator.gradient_reducer(background=True, sets=2, **hooks)
        scheme = DoubleBuffered(communicator, reducer, zero_fill)
    else:
        reducer = communicator.gradient_reducer(**hooks) if hooks else None
        scheme = AfterBackward(communicator, zero_fill, reducer)
    restart_after_losses(communicator, scheme)
    compressed = reducer if compression is not None else None  # with local steps, the scheme has several reducers
    if not shard_state:
        return MultiNodeOptimizer(actual_optimizer, communicator, zero_fill, scheme, compressed)
    refuse_elastic(communicator, "shard_state")
    assert isinstance(scheme, Synchronous)  # others are refused above
    shards = Shards(communicator, actual_optimizer)
    return MultiNodeOptimizer(actual_optimizer, communicator, zero_fill, Sharded(scheme, shards), compressed, shards)


def _expect_optimizer(actual_optimizer: Any) -> None:
    if isinstance(actual_optimizer, type) or not (
        hasattr(actual_optimizer, "setup") and hasattr(actual_optimizer, "update")
    ):
        raise TypeError(
            "expected a chainer.Optimizer for actual_optimizer, or an object with setup, update and target; got "
            f"{type(actual_optimizer).__name__}: {actual_optimizer!r:.80}"
        )


def _given(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _expect_alone(local_steps: Any, asynchronous: Any, others: Mapping[str, bool], hooks: Mapping[str, Any]) -> None:
    if local_steps is not None and asynchronous is not False:
        raise ValueError("expected one of local_steps and asynchronous, got both")
    name = "local_steps" if local_steps is not None else "asynchronous"
    for other, is_asked_for in others.items():
        if is_asked_for:
            raise ValueError(f"expected {name} without {other}, got both: gradients are not averaged in every step")
    if hooks and name == "asynchronous":
        raise ValueError(
            f"expected asynchronous without {' and '.join(hooks)}, got both: whole parameters are sent, and no "
            "part of them may be omitted"
        )


class MultiNodeOptimizer:
    """A Chainer optimizer whose gradients are averaged over all ranks; see :func:`create_multi_node_optimizer`.

    A derived class in a script may override ``update``.

    Args:
        actual_optimizer: The optimizer.
        communicator: The ranks.
        zero_fill: Whether an initialised parameter without a gradient counts as one of zeros.
        scheme: When gradients are averaged; by default after the backward pass.
        compressed: The reducer that averages gradients, if it compresses.
        shards: This rank's part of the optimizer's state, if the state is sharded.

    Attributes:
        target_params: The names of the parameters, and whether each was initialised, as :meth:`is_changed` last saw
            them.
    """

    __slots__ = (
        *("__weakref__", "_accumulates", "_participant", "_commits", "_compressed", "_has_part", "_scheme", "_shards"),
        *("actual_optimizer", "communicator", "target_params"),
    )

    actual_optimizer: chainer.Optimizer
    communicator: CommunicatorBase
    target_params: list[tuple[str, bool]]

    def __init__(
        self,
        actual_optimizer: chainer.Optimizer,
        communicator: CommunicatorBase,
        zero_fill: bool,
        scheme: Scheme | None = None,
        compressed: GradientReducer | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self._scheme = AfterBackward(communicator, zero_fill, None) if scheme is None else scheme
        self._compressed = compressed
        self._shards = shards
        self.target_params = []
        self._accumulates = False
        self._has_part = False
        self._participant: JoinParticipant | None = None
        self._commits = is_elastic(communicator)

    @property
    def zero_fill(self) -> bool:
        """Whether an initialised parameter without a gradient counts as one of zeros."""
        return self._scheme.zero_fill

    @property
    def compression_report(self) -> CompressionReport | None:
        """The effect of compression in the last step on this rank; ``None`` without compression.

        With ``local_steps``, nothing is sent in a step without a meeting.
        """
        return self._scheme.compression_report if self._compressed is None else self._compressed.compression_report

    def setup(self, link: chainer.Link) -> MultiNodeOptimizer:
        """Set the model whose parameters are to be optimised, and return this optimizer."""
        self.actual_optimizer.setup(link)
        return self

    def update(self, lossfun: Callable[..., chainer.Variable] | None = None, *args: Any, **kwds: Any) -> None:
        """Average the gradients over all ranks and update the parameters; collective.

        The first call only distributes the parameters of rank 0 to all ranks, and does not update them. So does the
        first call after parameters were added, renamed or initialised.

        Args:
            lossfun: The function that computes the loss, for which gradients are then computed; ``None`` if the
                gradients have been computed already.
            args: Passed to ``lossfun``, and to the actual optimizer's ``update`` after ``None``.
            kwds: Keyword arguments, passed in the same way.

        Raises:
            RuntimeError: No model was set up.
            ValueError: The ranks' models or gradients differ in names, shapes or dtypes (on every rank).
        """
        model = self.actual_optimizer.target
        if model is None:
            raise RuntimeError("expected a model before the first update: call setup(model)")
        with span("step"):
            if self._participant is not None:
                self._participant.begin(model, lossfun, args, kwds, self._accumulates)
            forward = None if lossfun is None else partial(lossfun, *args, **kwds)
            # The arguments are passed to the actual optimizer, as in ChainerMN 7: a script's own optimizer may use
            # them.
            step = partial(self.actual_optimizer.update, None, *args, **kwds)
            if self._commits and not self._accumulates:
                self._commit(model, forward, step)
            else:
                self._average_and_step(model, forward, step)

    def _commit(self, model: chainer.Link, forward: Forward | None, step: Callable[[], None]) -> None:
        """Average, wait until all ranks agree, then take the step; repeat this after a loss, if possible."""
        has_part, seen = self._has_part, self.target_params

        def restore() -> None:
            self._has_part, self.target_params = has_part, seen

        attempt = partial(self._average_and_step, model, forward)
        can_repeat = forward is not None
        take_step = commit(self.communicator, model, attempt, step, restore, can_repeat=can_repeat, has_part=has_part)
        take_step()

    def _average_and_step(
        self, model: chainer.Link, forward: Forward | None, step: Callable[[], None], defer: Defer | None = None
    ) -> None:
        backward = None
        if forward is not None:
            with span("forward"):
                loss = forward()
            backward = self._backward_from(model, loss)
            del loss  # the backward pass frees the graph before the gradients are averaged
        if self._accumulates:
            _run(backward)
            self._has_part = True
            return
        self._has_part = False
        if self.is_changed(model):
            self.target_params = []  # after an exception they still have to be distributed
            if self._participant is None:
                _run(backward)
            else:
                self._participant.ask_for_parameters(model, backward)
            self._share_out(model)
        else:
            if self._participant is not None:
                self._participant.go_on(model)
            self._step(model, backward, step, defer)
            if self._scheme.may_diverge:
                chainer.report({"meeting": float(self._scheme.is_meeting)})

    def _share_out(self, model: chainer.Link) -> None:
        """Distribute the parameters of rank 0 to all ranks; collective."""
        self.target_params = []
        if self._scheme.synchronous is not None and self._participant is None:
            self._scheme.synchronous.agree_on("bcast_data", model, compares=True)
        own(self, (param for _, param in model.namedparams()))
        self._scheme.restart(model)
        share_out(self.communicator, model, fills_in=self._participant is not None)
        self.is_changed(model)

    def _step(
        self, model: chainer.Link, backward: Backward | None, step: Callable[[], None], defer: Defer | None = None
    ) -> None:
        has_loss = backward is not None or (self._participant is not None and self._participant.state.is_absent)
        loss_scale = getattr(self.actual_optimizer, "_loss_scale", None) if has_loss else None
        if self._compressed is not None and has_loss:
            # The part that has not been sent yet is in the units of the gradients.
            self._compressed.scale_errors(loss_scale or 1.0)
        exact = self._scheme.synchronous
        if exact is not None:
            exact.loss_scale = loss_scale

        def take_step() -> None:
            _take_step(model, loss_scale if exact is None else exact.loss_scale, step)

        self._scheme.step(model, backward, take_step if defer is None else partial(defer, take_step))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which ``update`` only adds up gradients: no communication, and no step.

        The first ``update`` after the context adds its own gradients, averages the sum and takes a step, so that k
        parts of a mini-batch need only one communication::

            with optimizer.no_sync():
                for part in parts[:-1]:
                    optimizer.update(loss, part)
            optimizer.update(loss, parts[-1])
        """
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def join(self, over: str = "present") -> AbstractContextManager[None]:
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
        return joined(self, over)

    def join_in_steps(self, over: str = "present") -> None:
        """Declare that from now on, every rank calls either ``update`` or :meth:`update_without_data` in each step.

        For updaters that do so. Call it on every rank.

        Args:
            over: The ranks to average over, ``"present"`` or ``"all"``.
        """
        self._participant = JoinParticipant(self, over)

    def update_without_data(self, lossfun: Callable[..., chainer.Variable] | None = None) -> None:
        """Take part in a step of other ranks without own data; collective with their ``update``.

        If no rank has data, none takes a step.

        Args:
            lossfun: The loss function that the other ranks pass to ``update``; called if the model communicates. By
                default the one that was passed last, or the model.

        Raises:
            RuntimeError: No model was set up, or :meth:`join_in_steps` was not called.
        """
        model = self.actual_optimizer.target
        if model is None:
            raise RuntimeError("expected a model before the first update: call setup(model)")
        if self._participant is None:
            raise RuntimeError("expected join_in_steps() before an update without data")
        with span("step"):
            self._participant.stand_in(model, lossfun)

    def assume_synchronized(self) -> None:
        """Assume that the parameters of all ranks are equal already: the next update takes a step.

        Call it on every rank, after the same snapshot was loaded on all of them.
        """
        model = self.actual_optimizer.target
        own(self, (param for _, param in model.namedparams()))
        self.is_changed(model)

    @property
    def is_meeting(self) -> bool:
        """Whether ranks exchanged data in the latest step; always true without local or asynchronous steps."""
        return self._scheme.is_meeting

    @property
    def may_diverge(self) -> bool:
        """Whether the ranks' parameters may differ between two steps, with ``local_steps`` or ``asynchronous``."""
        return self._scheme.may_diverge

    def synchronize(self) -> None:
        """Make the parameters of all ranks equal, after local or asynchronous steps; collective.

        A rank that has called this takes part in the meetings of the others until all ranks have called it. It is
        called when Chainer's trainer ends; multi-node evaluators, checkpointers and snapshots call it before they
        begin. In your own training loop, call it before you evaluate or save, and at the end.

        Raises:
            RuntimeError: No model was set up; or another rank came to a different meeting (on every rank).
        """
        model = self.actual_optimizer.target
        if model is None:
            raise RuntimeError("expected a model before synchronize: call setup(model)")
        if self._scheme.synchronize(model, bool(self.target_params)):
            self.assume_synchronized()

    def serialize(self, serializer: Any) -> None:
        """Save or load the state of the actual optimizer, of pending exchanges, and of compression.

        Not collective. Plain Chainer ignores the latter two; if they are missing, they count as empty. Sharded state is
        saved as if it were not sharded, after :meth:`consolidate`.

        Raises:
            RuntimeError: The state is sharded and is to be saved, without :meth:`consolidate` before.
        """
        (self._shards or self.actual_optimizer).serialize(serializer)
        if self.actual_optimizer.target is None:
            return
        if isinstance(serializer, chainer.Serializer) and self._scheme.has_diverged:
            warnings.warn(
                f"the parameters of rank {self.communicator.rank} are saved while those of other ranks differ: call "
                "synchronize() on every rank before, or save by create_multi_node_checkpointer or multi_node_snapshot",
                RuntimeWarning,
                stacklevel=2,
            )
        self._scheme.serialize(serializer, self.actual_optimizer.target)
        if self._compressed is not None:
            serialize_compression(serializer, self._compressed)

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
        if self.actual_optimizer.target is None:
            raise RuntimeError("expected a model before consolidate: call setup(model)")
        if self._shards is not None:
            self._shards.consolidate(to)

    def own_part(self) -> AbstractContextManager[None]:
        """Return a context in which :meth:`serialize` saves only this rank's part of sharded state.

        For checkpoints of all ranks together; they can be loaded only by the same number of ranks.
        """
        return nullcontext() if self._shards is None else self._shards.own_part()

    def is_changed(self, target: Model) -> bool:
        """Return whether the names of a model's parameters, or which are initialised, differ from the last call.

        The first call returns ``True`` for any model that has parameters.
        """
        previous = self.target_params
        self.target_params = [(name, param.data is not None) for name, param in sorted(target.namedparams())]
        return self.target_params != previous

    def _backward_from(self, model: chainer.Link, loss: chainer.Variable) -> Backward:
        """Clear the gradients, unless they are added up, and return the backward pass that starts from ``loss``."""
        if not self._has_part:
            if getattr(self.actual_optimizer, "_use_cleargrads", True):
                model.cleargrads()
            else:
                model.zerograds()
        # Chainer keeps the loss scale of loss_scaling() and set_loss_scale() only in a private attribute.
        loss_scale = getattr(self.actual_optimizer, "_loss_scale", None)

        held = [loss]

        def backward(on_final: Callable[[chainer.Variable], None] | None) -> None:
            taken = held.pop()  # so that the graph is freed before the gradients are averaged
            with span("backward"):
                if on_final is None:
                    taken.backward(loss_scale=loss_scale)
                else:
                    overlapping_backward(taken, loss_scale, on_final)

        return backward

    def __getattr__(self, name: str) -> Any:
        if name in MultiNodeOptimizer.__slots__:  # not set yet: while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in MultiNodeOptimizer.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.actual_optimizer, name, value)


def _run(backward: Backward | None) -> None:
    if backward is not None:
        backward(None)


def _take_step(model: chainer.Link, loss_scale: float | None, step: Callable[[], None]) -> None:
    if loss_scale is not None:
        # A mean is scaled even if this rank's backward pass gave no gradient.
        for param in model.params():
            param._loss_scale = loss_scale  # noqa: SLF001
    with span("update"):
        step()
