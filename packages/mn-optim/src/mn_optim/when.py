"""When ranks communicate, and what they send: the values of ``when`` of a multi-node optimizer, which can be nested."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, fields
from typing import Any

import chainer

from mn_comm import CommunicationHook, CommunicatorBase, expect_same, raise_on_all, transact
from mn_comm.building_blocks import CompressionScheme, refuse_elastic
from mn_optim.schemes.asynchronous import AsynchronousMean
from mn_optim.schemes.double_buffered import DoubleBuffered
from mn_optim.schemes.local_steps import LocalSteps
from mn_optim.schemes.overlapped import Overlapped
from mn_optim.schemes.scheme import NO_REPLACEMENT, Plain, Scheme, Synchronous
from mn_optim.schemes.two_phases import TwoPhases
from mn_optim.sharding.shards import Shards

Send = CommunicationHook | CompressionScheme | None
"""What is sent instead of exact gradients: a compression of :mod:`mn_compress`, such as ``Int8()``, or a function that
gets each bucket of gradients (``index``, ``names``, ``shapes``, and ``flat``, the concatenated gradients) and returns a
:class:`mn_comm.Future` of their mean; the exact mean is ``bucket.average()``. The function corresponds to
``register_comm_hook`` of PyTorch's ``DistributedDataParallel``. The part that a compression has not sent yet is saved
with the optimizer, on each rank."""


class When:
    """The base class of what determines when ranks communicate."""

    def start(self, communicator: CommunicatorBase, actual_optimizer: Any) -> Scheme:
        """Return the scheme that performs the steps of an optimizer, on every rank.

        Args:
            communicator: The ranks that train replicas of the same model.
            actual_optimizer: The optimizer.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class AfterBackward(When):
    """Gradients are averaged after the backward pass, in every step.

    Args:
        zero_fill: Whether the missing gradient of an initialised parameter counts as zeros. Otherwise it is omitted
            from the average, and must be missing on every rank.
        send: How gradients are compressed or averaged; ``None`` for exact means. See :data:`Send`.
    """

    zero_fill: bool = True
    send: Send = None

    def start(self, communicator: CommunicatorBase, actual_optimizer: Any) -> Synchronous:
        """Return the scheme."""
        options = _reducer_options(self.send)
        reducer = communicator.gradient_reducer(**options) if options else None
        return Plain(communicator, reducer, self.zero_fill)


class AsInChainerMN7(AfterBackward):
    """``AfterBackward`` in a script that may create the optimizer on some ranks only: the ranks do not compare it."""


@dataclass(frozen=True)
class DuringBackward(When):
    """Gradients are averaged during the backward pass, those of the last layers first.

    ``update`` must be called with the loss function. The result is equal, bit for bit, to averaging the same buckets
    after the backward pass. A missing gradient counts as zeros: when the first gradients are sent, it is not known yet
    which others will follow.

    Args:
        bucket_bytes: How many bytes of gradients are sent together, unless a single gradient is larger.
        send: How gradients are compressed or averaged; ``None`` for exact means. See :data:`Send`.
    """

    bucket_bytes: int = 4 * 1024 * 1024
    send: Send = None

    def start(self, communicator: CommunicatorBase, actual_optimizer: Any) -> Synchronous:
        """Return the scheme."""
        options = _reducer_options(self.send)
        reducer = communicator.gradient_reducer(background=True, bucket_bytes=self.bucket_bytes, **options)
        return Overlapped(communicator, reducer)


@dataclass(frozen=True)
class OneStepLate(When):
    """Double buffering: each step applies the means of the previous step, while its own gradients are averaged.

    Args:
        zero_fill: Whether the missing gradient of an initialised parameter counts as zeros; see
            :class:`AfterBackward`.
        send: How gradients are compressed or averaged; ``None`` for exact means. See :data:`Send`.
    """

    zero_fill: bool = True
    send: Send = None

    def start(self, communicator: CommunicatorBase, actual_optimizer: Any) -> Synchronous:
        """Return the scheme."""
        reducer = communicator.gradient_reducer(background=True, sets=2, **_reducer_options(self.send))
        return DoubleBuffered(communicator, reducer, self.zero_fill)


@dataclass(frozen=True)
class Sharded(When):
    """Each parameter is updated by only one rank, which alone has the optimizer's state for it: ZeRO-1.

    This rank sends the updated parameter to all others. The result is the same, bit for bit. Hooks for single
    parameters that come before the update run on the rank that updates the parameter, unless there is also a hook over
    all parameters before the update. Before one rank saves the optimizer, every rank calls
    :meth:`~mn_optim.MultiNodeOptimizer.consolidate`.

    Args:
        when: When gradients are averaged, in every step.

    Raises:
        TypeError: ``when`` is not one of :class:`AfterBackward`, :class:`DuringBackward` and :class:`OneStepLate`.
    """

    when: AfterBackward | DuringBackward | OneStepLate = AfterBackward()

    def __post_init__(self) -> None:
        _expect_kind((AfterBackward, DuringBackward, OneStepLate), "when", self.when)

    def start(self, communicator: CommunicatorBase, actual_optimizer: Any) -> Scheme:
        """Return the scheme."""
        refuse_elastic(communicator, "Sharded", NO_REPLACEMENT)
        scheme = self.when.start(communicator, actual_optimizer)
        scheme.shards = Shards(communicator, actual_optimizer)
        return scheme


@dataclass(frozen=True)
class SynchronousFirst(When):
    """Gradients are averaged in each of the first steps; then ranks communicate in another way.

    Before :class:`LocalSGD`, this is the post-local SGD of Lin et al. 2018, arXiv 1808.07217.

    Args:
        steps: The number of steps in which gradients are averaged first.
        then: When ranks communicate after that.
        first: When ranks communicate in these steps.

    Raises:
        TypeError: ``steps`` is not an integer; ``first`` does not average gradients in every step; or ``then`` is not
            one of the classes on this page, or a ``SynchronousFirst`` itself.
        ValueError: ``steps`` is below 0.
    """

    steps: int
    then: When
    first: AfterBackward | DuringBackward = AfterBackward()

    def __post_init__(self) -> None:
        expect_at_least(0, "steps", self.steps)
        _expect_kind((AfterBackward, DuringBackward), "first", self.first)
        later = (LocalSGD, DiLoCo, StreamingDiLoCo, Asynchronous, AfterBackward, DuringBackward, OneStepLate, Sharded)
        _expect_kind(later, "then", self.then)

    def start(self, communicator: CommunicatorBase, actual_optimizer: Any) -> Scheme:
        """Return the scheme."""
        first = self.first.start(communicator, actual_optimizer)
        return TwoPhases(communicator, self.steps, first, self.then.start(communicator, actual_optimizer))


def _default_outer() -> chainer.Optimizer:
    return chainer.optimizers.NesterovAG(lr=0.7, momentum=0.9)


_OPTIONS = ("steps", "outer", "average_state", "fragments", "delay", "alpha")


class _EveryFewSteps(When):
    """The base class of those in which ranks meet every few steps."""

    steps: int
    send: Send

    def __post_init__(self) -> None:
        expect_at_least(1, "steps", self.steps)

    def start(self, communicator: CommunicatorBase, actual_optimizer: Any) -> Scheme:
        """Return the scheme."""
        refuse_elastic(communicator, type(self).__name__, NO_REPLACEMENT)
        # By default, the outer optimizer applies the mean unchanged. A script's own subclass may have more fields.
        options = {"outer": chainer.optimizers.SGD(lr=1.0)}
        options |= {name: value for name, value in vars(self).items() if name in _OPTIONS}
        return LocalSteps(communicator, sends=_reducer_options(self.send), **options)


@dataclass(frozen=True)
class LocalSGD(_EveryFewSteps):
    """Local SGD: each rank takes local steps, then all ranks continue from the mean of their parameters.

    Stich 2018, arXiv 1805.09767. With :class:`SynchronousFirst` around it, the post-local SGD of Lin et al. 2018.

    Args:
        steps: How many steps a rank takes between two meetings.
        average_state: Whether the optimizer's state (momentum, Adam's moments) is averaged as well.
        send: How the changes of the parameters since the last meeting are compressed or averaged; ``None`` for exact
            means. See :data:`Send`.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: ``steps`` is below 1.
    """

    steps: int
    average_state: bool = False
    send: Send = None


@dataclass(frozen=True)
class DiLoCo(_EveryFewSteps):
    """DiLoCo: the mean change of the ranks' parameters is the gradient of a second, outer optimizer.

    Douillard et al. 2023, arXiv 2311.08105. The outer optimizer holds the parameters that all ranks have in common;
    after its step, every rank continues from these.

    Args:
        steps: How many steps a rank takes between two meetings.
        outer: The outer optimizer, not set up; it is copied. By default Nesterov's, with the paper's numbers.
        send: How the changes of the parameters since the last meeting are compressed or averaged; ``None`` for exact
            means. See :data:`Send`.

    Raises:
        TypeError: An argument is not an integer, or ``outer`` is not an optimizer of Chainer.
        ValueError: ``steps`` is below 1.
    """

    steps: int
    outer: chainer.Optimizer = field(default_factory=_default_outer)
    send: Send = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_optimizer(self.outer)


@dataclass(frozen=True)
class StreamingDiLoCo(_EveryFewSteps):
    """Streaming DiLoCo: DiLoCo with a model in fragments, which are exchanged one by one during training.

    Douillard et al. 2025, arXiv 2501.18512. Each fragment has one meeting every ``steps`` steps. The exchange runs in
    the background. The outer optimizer takes its step ``delay`` steps after the exchange began, and the result is
    combined with the rank's own parameters.

    Args:
        steps: The number of steps between two meetings of the same fragment.
        outer: The outer optimizer, not set up; each fragment has a copy. By default Nesterov's, with the paper's
            numbers.
        fragments: The number of fragments, of about equal size, into which the model is divided; parameters are not
            split.
        delay: How many steps an exchange may take. With 0, the rank waits for it immediately.
        alpha: The share of the common parameters in a rank's new parameters. With 1, it takes the common parameters,
            and loses the changes that it made during the delay. The paper's factor is the complement, the share of the
            rank's own parameters.
        send: How the changes of the parameters since the last meeting are compressed or averaged; ``None`` for exact
            means. See :data:`Send`.

    Raises:
        TypeError: An argument is not an integer, or ``outer`` is not an optimizer of Chainer.
        ValueError: ``steps`` is below 1, ``fragments`` not in 1..steps, ``delay`` not in
            0..steps-1, or ``alpha`` outside (0, 1].
    """

    steps: int
    outer: chainer.Optimizer = field(default_factory=_default_outer)
    fragments: int = 4
    delay: int = 1
    alpha: float = 0.5
    send: Send = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_optimizer(self.outer)
        if not 1 <= operator.index(self.fragments) <= self.steps:
            raise ValueError(
                f"expected fragments in 1..{self.steps}, as each needs a step to meet; got {self.fragments}"
            )
        if not 0 <= operator.index(self.delay) < self.steps:
            raise ValueError(
                f"expected delay in 0..{self.steps - 1}, so that an exchange ends before the next one; got {self.delay}"
            )
        if not 0 < self.alpha <= 1:
            raise ValueError(f"expected alpha in (0, 1], got {self.alpha}")


@dataclass(frozen=True)
class Asynchronous(When):
    """Repeated averaging of the parameters in the background, for which no rank waits.

    Each rank continues to train in the meantime, and then adds the difference between the mean and the parameters that
    it sent. Bagua calls this asynchronous model average; Lian et al. 2017, arXiv 1710.06952, analyse its pairwise form.

    Args:
        max_staleness: A rank that has taken this many steps since it last sent its parameters waits for their mean.
            This limits how far ranks drift apart when the network is slow; no rank waits for a slow rank.
        interval: The number of seconds between the end of an average and the start of the next.

    Raises:
        TypeError: An argument is not a number.
        ValueError: ``max_staleness`` is below 1, or ``interval`` below 0.
    """

    max_staleness: int = 100
    interval: float = 0.01

    def __post_init__(self) -> None:
        expect_at_least(1, "max_staleness", self.max_staleness)
        if not 0 <= self.interval < float("inf"):
            raise ValueError(f"expected interval of at least 0 seconds, got {self.interval}")

    def start(self, communicator: CommunicatorBase, actual_optimizer: Any) -> Scheme:
        """Return the scheme."""
        refuse_elastic(communicator, "Asynchronous", NO_REPLACEMENT)
        return AsynchronousMean(communicator, self.max_staleness, self.interval)


def expect_when(communicator: CommunicatorBase, value: Any) -> When:
    """Return a value of ``when``, after comparing it with those of the other ranks.

    Collective unless it is :class:`AsInChainerMN7`. A bool stands for ``AfterBackward(zero_fill)``.

    Raises:
        TypeError: It is of another type (on every rank).
        ValueError: The ranks' values differ (on every rank).
    """
    if isinstance(value, AsInChainerMN7):
        return value
    if isinstance(value, bool):
        value = AfterBackward(value)

    def agree() -> None:
        with raise_on_all(communicator):
            if not isinstance(value, When):
                raise TypeError(
                    f"expected AfterBackward() or alike for when, got {type(value).__name__}: {value!r:.80}"
                )
        expect_same(communicator, "when", _describe(value))

    transact(communicator, agree)
    return value  # type: ignore[no-any-return]


def _reducer_options(send: Send) -> dict[str, Any]:
    """Return the argument of ``gradient_reducer`` for what is sent; it raises where that is neither."""
    if send is None:
        return {}
    is_hook = callable(send) and not isinstance(send, type)
    return {"comm_hook" if is_hook else "compression": send}


def _describe(value: Any) -> str:
    """Describe options that must be the same on all ranks, as text."""
    if isinstance(value, When):
        options = {each.name: getattr(value, each.name) for each in fields(value)}  # type: ignore[arg-type]
        options["send"] = "".join(_reducer_options(options.get("send")))  # the reducer compares the rest
        return f"{type(value).__name__}({', '.join(f'{k}={_describe(v)}' for k, v in options.items() if v != '')})"
    if isinstance(value, chainer.Optimizer):  # its repr would contain its address
        numbers = sorted(value.hyperparam.get_dict().items()) if hasattr(value, "hyperparam") else []
        return f"{type(value).__name__}({', '.join(f'{k}={v}' for k, v in numbers)})"
    return str(value)


def expect_at_least(lowest: int, name: str, value: Any) -> None:
    """Raise TypeError unless a value is an integer, and ValueError if it is too small."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"expected an integer for {name}, got {type(value).__name__}: {value!r:.80}")
    if value < lowest:
        raise ValueError(f"expected {name} of at least {lowest}, got {value}")


def _expect_optimizer(outer: Any) -> None:
    if not isinstance(outer, chainer.Optimizer):
        raise TypeError(f"expected a chainer.Optimizer for outer, got {type(outer).__name__}: {outer!r:.80}")
    if getattr(outer, "target", None) is not None:
        raise ValueError("expected an outer optimizer that is not set up, got one that has a model")


def _expect_kind(kinds: tuple[type[When], ...], name: str, value: Any) -> None:
    if not isinstance(value, kinds):
        names = ", ".join(f"{kind.__name__}()" for kind in kinds)
        raise TypeError(f"expected one of {names} for {name}, got {type(value).__name__}: {value!r:.80}")
