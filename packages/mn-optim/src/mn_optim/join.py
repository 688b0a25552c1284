"""Updates in which a rank without data takes part, so that no other rank waits for it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda

from mn_comm.building_blocks import refuse_elastic
from mn_optim.join_state import Everyone, JoinState, LeftByException, NeedsParameters, describe
from mn_optim.schemes.scheme import NO_REPLACEMENT, Backward, Stepper
from mn_optim.side_effects import communicating_links, keep_persistents, observing

NO_SAMPLES = "multi_node_no_samples"
"""The name of Chainer's configuration that is true while a model runs on a sample that does not count."""
LossFunction = Callable[..., chainer.Variable]


class JoinParticipant:
    """An optimizer's part in a join: it tracks which ranks have data, and takes part for this rank if it has none.

    If the model itself communicates, a rank without data runs it on a sample that does not count, so that it takes part
    in this communication as well; all ranks agree on this beforehand. (Some of Chainer's functions fail on empty
    batches.) Otherwise the rank only adds zeros, and its messages are part of the check before every averaging.

    Args:
        stepper: Takes the optimizer's steps.
        over: The ranks to average over: ``"present"`` for the ranks that have data, ``"all"`` for all ranks.
        is_lasting: Whether the join has no end, until another one replaces it.

    Attributes:
        is_lasting: Whether the join has no end.

    Raises:
        ValueError: ``over`` is neither of these; or missing gradients do not count as zeros.
    """

    def __init__(self, stepper: Stepper, over: str, is_lasting: bool = False) -> None:
        if over not in ("present", "all"):
            raise ValueError(f"expected 'present' or 'all' for over, got {over!r}")
        refuse_elastic(stepper.communicator, "join", NO_REPLACEMENT)
        if not stepper.scheme.zero_fill:
            raise ValueError("expected zero_fill=True with join, got False: a rank without data has no gradients")
        self.is_lasting = is_lasting
        self._stepper = stepper
        self._scheme = stepper.scheme
        self._lossfun: LossFunction | None = None
        self._state = JoinState(stepper.communicator.rank, stepper.communicator.size, over)
        self._message = self._state.message
        self._scheme.use_join(self._state)

    def begin(self, model: chainer.Link, lossfun: LossFunction | None, args: Any, kwds: Any, is_part: bool) -> None:
        """Prepare an update with data; collective if the model communicates.

        Raises:
            RuntimeError: The model communicates, and the update is of a part of a mini-batch (on all ranks).
        """
        self._message.is_absent = False
        self._message.hyperparameters = _hyperparameters(self._stepper.actual_optimizer)
        if not self._is_collective:
            return
        if is_part:
            error = RuntimeError(
                "expected whole mini-batches within join, because the model communicates; got a part of one in no_sync"
            )
            self.fail(model, error)  # not earlier: a rank with a single sample has no parts
            self._state.is_together = True
            raise error
        self._lossfun = lossfun
        self._message.specimen = (_mapped(_first, args), _mapped(_first, kwds))
        self._meet(model)

    def ask_for_parameters(self, model: chainer.Link, backward: Backward | None) -> None:
        """Make the ranks without data take part in the distribution of parameters; collective.

        Args:
            model: The model.
            backward: The backward pass. It is run, except if ranks wait for one another in it: then the ranks without
                data would be informed too late.
        """
        if backward is not None and not self._is_collective:
            backward(None)
        if self._scheme.synchronous is not None:
            self._message.needs_parameters = True
            try:
                self._scheme.synchronous.exchange_messages(model)
            except NeedsParameters:
                self._state.is_together = False

    def go_on(self, model: chainer.Link) -> None:
        """Begin the backward pass and what follows; collective if the model communicates."""
        if self._is_collective:
            self._meet(model)

    def stand_in(self, model: chainer.Link, lossfun: LossFunction | None = None) -> None:
        """Take part in an update of other ranks without data; collective.

        Args:
            model: The model.
            lossfun: The function to run, if the model communicates; by default the last one that was run, or the model.

        Raises:
            Everyone: All ranks have left the join.
        """
        stepper, scheme = self._stepper, self._scheme
        self._message.is_absent = True
        self._lossfun = lossfun or self._lossfun
        if scheme.synchronous is None:
            if stepper.needs_sharing(model):
                stepper.share_out(model)
            else:
                scheme.idle(model)
            return
        try:
            model.cleargrads()
            stepper.has_part = False  # what was added up for a step that this rank has not completed is gone
            backward = self._backward_of_nothing(model) if self._is_collective else None
            stepper.step(model, backward, self._take_step)
        except NeedsParameters:
            self._share_out(model)

    def _take_step(self) -> None:
        optimizer = self._stepper.actual_optimizer
        hyperparam = getattr(optimizer, "hyperparam", None)
        for name, value in self._message.hyperparameters.items():
            setattr(hyperparam, name, value)
        optimizer.update()

    def leave(self, model: chainer.Link) -> None:
        """Take part in updates without data until all ranks have left; collective."""
        self._message.has_left = self._message.is_absent = True
        try:
            if self._scheme.synchronous is not None:
                try:
                    self._scheme.synchronous.exchange_messages(model)
                except NeedsParameters:
                    self._share_out(model)
            while self._scheme.synchronous is not None:
                self.stand_in(model)
        except Everyone:
            self._state.is_together = False
        else:
            self._stepper.synchronize()

    def fail(self, model: chainer.Link, error: Exception) -> None:
        """Inform the other ranks that this one leaves because of an exception, if necessary; collective."""
        if self._state.is_together or isinstance(error, LeftByException):
            return
        if self._scheme.synchronous is not None:
            self._message.failure = describe(error)
            self._scheme.synchronous.exchange_messages(model)
        else:
            self._scheme.fail(model, error)

    def _share_out(self, model: chainer.Link) -> None:
        self._state.is_together = False
        self._stepper.share_out(model)

    @functools.cached_property
    def _communicates(self) -> bool:
        return any(True for _ in communicating_links(self._stepper.actual_optimizer.target))

    @property
    def _is_collective(self) -> bool:
        """Whether the ranks' passes through the model wait for one another."""
        return self._scheme.synchronous is not None and self._communicates

    def _meet(self, model: chainer.Link) -> None:
        assert self._scheme.synchronous is not None
        self._scheme.synchronous.exchange_messages(model, until_quiet=True)
        self._state.is_together = True

    def _backward_of_nothing(self, model: chainer.Link) -> Backward | None:
        """Run the model on a sample that does not count; return its backward pass, if any rank has data; collective."""
        self._meet(model)
        if not self._state.factor or self._message.specimen is None:
            return None
        lossfun = self._lossfun or model
        args, kwds = self._message.specimen
        to_device = model.device.send
        # Running means of links that do not communicate: these links do not know that a sample does not count.
        shared = {id(link) for _, link in communicating_links(model)}
        put_back = keep_persistents(link for link in model.links() if id(link) not in shared)
        with _silently(), observing(), chainer.using_config(NO_SAMPLES, True):
            loss = lossfun(*_mapped(to_device, args), **_mapped(to_device, kwds)) * 0
        put_back()
        self._meet(model)
        run = self._stepper.backward_from(model, loss)
        del loss

        def backward(on_final: Callable[[chainer.Variable], None] | None) -> None:
            with _silently():
                run(None)  # gradients are not reported one by one: they are not final yet
            for param in model.params():
                if param.data is not None and param.grad is not None:
                    # NaN from infinity times the zero above. The array may be a view that cannot be written to.
                    xp, grad = param.device.xp, param.grad
                    param.grad = xp.where(xp.isfinite(grad), grad, grad.dtype.type(0))

        return backward


def _hyperparameters(optimizer: Any) -> dict[str, Any]:
    hyperparam: Any = getattr(optimizer, "hyperparam", None)
    return dict(hyperparam.get_dict()) if hasattr(hyperparam, "get_dict") else {}


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return arguments with a function applied to the arrays in them."""
    if isinstance(tree, chainer.Variable):
        tree = tree.array
    if hasattr(tree, "dtype") and tree.shape:
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _mapped(function, value) for key, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_mapped(function, value) for value in tree)
    return tree


def _first(array: Any) -> Any:
    """Return the first sample of an array, in host memory, so that it can be sent."""
    return np.array(cuda.to_cpu(array[:1]))


@contextmanager
def _silently() -> Iterator[None]:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
