"""The multi-node optimizer: backward, then average, then the actual optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import chainer

from mn_comm import (
    CommunicationHook,
    CommunicatorBase,
    Compression,
    CompressionReport,
    GradientReducer,
    Model,
    span,
)
from mn_optim.backward import backward as overlapping_backward
from mn_optim.remembered import serialize_compression
from mn_optim.schemes import AfterBackward, Backward, DoubleBuffered, Overlapped, Scheme

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
) -> MultiNodeOptimizer:
    """Make an optimizer average its gradients over all ranks before each step.

    With ``overlap``, ``double_buffering``, ``comm_hook`` or ``compression`` it is collective: every rank must call it.

    Args:
        actual_optimizer: A Chainer optimizer, set up already or not; or anything that has its ``setup``, ``update`` and
            ``target``.
        communicator: The ranks that train replicas of the same model.
        double_buffering: Whether each step applies the gradients of the one before, while its own travel.
        zero_fill: Whether an initialised parameter that got no gradient counts as one of zeros; otherwise it is omitted
            from the average, and must be missing on every rank alike.
        overlap: Whether gradients travel during the backward pass, those of the last layers first, whenever ``update``
            is given the loss function. The result is that of the same buckets averaged after the backward pass, bit for
            bit.
        bucket_bytes: How many bytes of gradients travel together when they overlap, unless one alone is larger.
        comm_hook: A function that is given each bucket of gradients (``index``, ``names``, ``shapes``, and ``flat``,
            the gradients one after the other) and returns a :class:`mn_comm.Future` of their mean. By default that is
            what
            ``bucket.average()`` returns. The model is ``register_comm_hook`` of PyTorch's ``DistributedDataParallel``.
        compression: How gradients are compressed where they cross between nodes, or between the ranks of a single one:
            ``Int8()``, ``TopK()``, ``PowerSGD()`` or ``OneBit()`` of :mod:`mn_comm.compression`. What it has not sent
            yet is saved with the optimizer, for each rank its own.

    Returns:
        The multi-node optimizer. Everything but its own methods is read from and written to ``actual_optimizer``.

    Raises:
        TypeError: ``actual_optimizer`` is not an optimizer.
            Or ``compression`` is none (on every rank).
        ValueError: ``overlap`` is asked for together with ``double_buffering``, or without ``zero_fill``; or
            ``compression`` together with ``comm_hook``, or with the communicator ``naive`` (on every rank).
        RuntimeError: Overlap or double buffering is asked for, but MPI was initialised without ``MPI_THREAD_MULTIPLE``.
    """
    if isinstance(actual_optimizer, type) or not (
        hasattr(actual_optimizer, "setup") and hasattr(actual_optimizer, "update")
    ):
        raise TypeError(
            "expected a chainer.Optimizer for actual_optimizer, or what has its setup, update and target; got "
            f"{type(actual_optimizer).__name__}: {actual_optimizer!r:.80}"
        )
    if overlap and double_buffering:
        raise ValueError("expected one of overlap and double_buffering, got both")
    if overlap and not zero_fill:
        # Which gradients there will be is not known when the first ones travel.
        raise ValueError("expected zero_fill=True with overlap, got False")
    scheme: Scheme
    reducer = None
    hooks: dict[str, Any] = {
        key: hook for key, hook in (("comm_hook", comm_hook), ("compression", compression)) if hook is not None
    }
    if overlap:
        reducer = communicator.gradient_reducer(background=True, bucket_bytes=bucket_bytes, **hooks)
        scheme = Overlapped(communicator, reducer)
    elif double_buffering:
        reducer = communicator.gradient_reducer(background=True, sets=2, **hooks)
        scheme = DoubleBuffered(communicator, reducer, zero_fill)
    else:
        reducer = communicator.gradient_reducer(**hooks) if hooks else None
        scheme = AfterBackward(communicator, zero_fill, reducer)
    compressed = reducer if compression is not None else None
    return MultiNodeOptimizer(actual_optimizer, communicator, zero_fill, scheme, compressed)


class MultiNodeOptimizer:
    """A Chainer optimizer whose gradients are averaged over all ranks; see :func:`create_multi_node_optimizer`.

    A derived class of a script's own may have an ``update`` of its own.

    Args:
        actual_optimizer: The optimizer.
        communicator: The ranks.
        zero_fill: Whether an initialised parameter without a gradient counts as one of zeros.
        scheme: When gradients are averaged; by default after the backward pass.
        compressed: What averages them, if that compresses.

    Attributes:
        target_params: The names of the parameters, and whether each was initialised, as :meth:`is_changed` last saw
            them.
    """

    __slots__ = (
        *("_accumulates", "_compressed", "_has_part", "_scheme"),
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
    ) -> None:
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self._scheme = AfterBackward(communicator, zero_fill, None) if scheme is None else scheme
        self._compressed = compressed
        self.target_params = []
        self._accumulates = False
        self._has_part = False

    @property
    def zero_fill(self) -> bool:
        """Whether an initialised parameter without a gradient counts as one of zeros."""
        return self._scheme.zero_fill

    @property
    def compression_report(self) -> CompressionReport | None:
        """What compression did in the last step on this rank; ``None`` without compression."""
        return None if self._compressed is None else self._compressed.compression_report

    def serialize(self, serializer: Any) -> None:
        """Save or load the actual optimizer, and what compression has not sent yet, with one of Chainer's serializers.

        Other optimizers ignore the latter in a snapshot, and a snapshot without it can be loaded.
        """
        self.actual_optimizer.serialize(serializer)
        if self._compressed is not None:
            serialize_compression(serializer, self._compressed)

    def setup(self, link: chainer.Link) -> MultiNodeOptimizer:
        """Set the model whose parameters are to be optimised, and return this optimizer."""
        self.actual_optimizer.setup(link)
        return self

    def update(self, lossfun: Callable[..., chainer.Variable] | None = None, *args: Any, **kwds: Any) -> None:
        """Average the gradients over all ranks and take a step; collective.

        The first time, and whenever the names of the parameters change or which of them are initialised, the parameters
        of rank 0 are given to all ranks instead, and no step is taken.

        Args:
            lossfun: Computes the loss, whose gradients are then computed; ``None`` if the gradients are there already.
            args: Passed to ``lossfun``.
            kwds: Passed to ``lossfun``.

        Raises:
            RuntimeError: No model was set up.
            ValueError: The ranks' models or gradients differ in names, shapes or dtypes (on every rank).
        """
        model = self.actual_optimizer.target
        if model is None:
            raise RuntimeError("expected a model before the first update: call setup(model)")
        with span("step"):
            backward = None
            if lossfun is not None:
                with span("forward"):
                    loss = lossfun(*args, **kwds)
                backward = self._backward_from(model, loss)
                del loss  # the backward pass frees the graph before the gradients are averaged
            self._average_and_step(model, backward)

    def _average_and_step(self, model: chainer.Link, backward: Backward | None) -> None:
        if self._accumulates:
            _run(backward)
            self._has_part = True
            return
        self._has_part = False
        if self.is_changed(model):
            seen, self.target_params = self.target_params, []  # after an exception they have still to be shared out
            _run(backward)
            self._scheme.restart()
            self.communicator.bcast_data(model)
            self.target_params = seen
        elif self._average(model, backward):
            with span("update"):
                self.actual_optimizer.update(None)

    def _average(self, model: chainer.Link, backward: Backward | None) -> bool:
        loss_scale = None if backward is None else getattr(self.actual_optimizer, "_loss_scale", None)
        if self._compressed is not None and backward is not None:
            # What was not sent yet is in the units of the gradients.
            self._compressed.scale_errors(loss_scale or 1.0)
        has_means = self._scheme.average(model, backward)
        if loss_scale is not None:
            # A mean is scaled also where this rank's backward pass gave no gradient.
            for param in model.params():
                param._loss_scale = loss_scale  # noqa: SLF001
        return has_means

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which ``update`` only adds gradients up: no communication, and no step.

        The first ``update`` after it adds its own, averages the sum and takes a step, so that k parts of a mini-batch
        need one communication::

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

    def assume_synchronized(self) -> None:
        """Take the parameters of all ranks to be equal already: the next update takes a step.

        To be called on every rank, after the same snapshot was loaded everywhere.
        """
        self.is_changed(self.actual_optimizer.target)

    def is_changed(self, target: Model) -> bool:
        """Return whether the names of a model's parameters, or which are initialised, differ from the last call.

        The first time that is so for any model that has parameters.
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
        # Chainer keeps the loss scale that loss_scaling() and set_loss_scale() set in a private attribute only.
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
