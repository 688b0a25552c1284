"""An updater for large mini-batches, which it splits into parts, and for ranks that run out of data."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import chainer
from chainer.dataset import concat_examples
from chainer.dataset.convert import _call_converter  # a number or a Device, as the converter needs it; not public
from chainer.training.updaters import StandardUpdater

from mn_optim.side_effects import observing
from mn_optim.when import expect_at_least

Observation = dict[str, Any]
LossFunction = Callable[..., chainer.Variable]


class MultiNodeUpdater(StandardUpdater):  # type: ignore[misc]  # Chainer has no types
    """Chainer's ``StandardUpdater``, extended: it can split a mini-batch into parts, and update without data.

    With ``micro_batches=k``, each mini-batch is split into k parts of almost equal size, or into single samples if it
    has fewer. The parts go through the model one after the other, and only one is on the device at a time. Gradients
    are added up, and there is one step, with one communication. It is the step of the whole mini-batch: parts are
    weighted by their number of samples. Batch normalisation normalises each part separately, and running means are
    updated with each part.

    With an iterator of ``create_uneven_iterator``, ranks that run out of data take part in the updates of the others,
    as in :meth:`mn_optim.MultiNodeOptimizer.join`.

    Args:
        iterator: As for ``StandardUpdater``: an iterator, or a dictionary of them, of which ``main`` is used.
        optimizer: Any optimizer, or a dictionary of them, of which ``main`` is used.
        converter: Converts a mini-batch to the arguments of ``loss_func``.
        device: Where to send the model.
        loss_func: Returns the loss: a mean over samples. By default the model.
        loss_scale: The factor for gradients, for float16.
        auto_new_epoch: Whether to inform the optimizer of new epochs.
        input_device: Where to send mini-batches; by default ``device``.
        micro_batches: The number of parts.
        over: The ranks to average over: ``"present"`` for the ranks that have data, ``"all"`` for all ranks.

    Raises:
        TypeError: ``micro_batches`` is not an integer; or ``iterator`` may return empty batches, and ``optimizer`` is
            not a multi-node optimizer.
        ValueError: ``micro_batches`` is below 1, or ``over`` is neither of these.
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        converter: Callable[..., Any] = concat_examples,
        device: Any = None,
        loss_func: LossFunction | None = None,
        loss_scale: float | None = None,
        auto_new_epoch: bool = True,
        *,
        input_device: Any = None,
        micro_batches: int = 1,
        over: str = "present",
    ) -> None:
        expect_at_least(1, "micro_batches", micro_batches)
        super().__init__(
            iterator, optimizer, converter, device, loss_func, loss_scale, auto_new_epoch, input_device=input_device
        )
        self.micro_batches = operator.index(micro_batches)
        if getattr(self.get_iterator("main"), "may_be_empty", False):
            main = self.get_optimizer("main")
            if not hasattr(main, "join_in_steps"):
                raise TypeError(
                    "expected an optimizer made by create_multi_node_optimizer, because batches of the iterator may be "
                    f"empty; got {type(main).__name__}"
                )
            main.join_in_steps(over)

    def update_core(self) -> None:
        """Take a step; collective with a multi-node optimizer."""
        iterator, optimizer = self.get_iterator("main"), self.get_optimizer("main")
        loss_func = self.loss_func or optimizer.target
        batch = iterator.next()
        if not getattr(iterator, "may_be_empty", False) or len(batch):
            self._update(optimizer, loss_func, batch)
        else:
            optimizer.update_without_data(loss_func)
        if self.auto_new_epoch and iterator.is_new_epoch:
            optimizer.new_epoch(auto=True)

    def _update(self, optimizer: Any, loss_func: LossFunction, batch: Any) -> None:
        if self.micro_batches > 1:
            _discard_parts(optimizer)
        # A whole mini-batch goes to the converter as it is: it need not have a length.
        n_parts = 1 if self.micro_batches == 1 else max(1, min(self.micro_batches, len(batch)))
        if n_parts == 1:
            args, kwds = self._arguments(batch)
            optimizer.update(loss_func, *args, **kwds)
            return
        points = [len(batch) * i // n_parts for i in range(n_parts + 1)]
        seen: list[tuple[float, Observation]] = []
        for begin, end in pairwise(points):
            args, kwds = self._arguments(batch[begin:end])
            share = (end - begin) / len(batch)
            with observing() as observation:
                _add_up(optimizer, begin == 0, end == len(batch), _weighted(loss_func, share), *args, **kwds)
            seen.append((share, observation))
            del args, kwds  # before the next part is on the device
        chainer.report(_mean(seen))

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments to which the converter converts a mini-batch."""
        converted = _call_converter(self.converter, batch, self.input_device)
        if isinstance(converted, tuple):
            return converted, {}
        return ((), converted) if isinstance(converted, dict) else ((converted,), {})


def _weighted(loss_func: LossFunction, share: float) -> LossFunction:
    return lambda *args, **kwds: loss_func(*args, **kwds) * share


def _discard_parts(optimizer: Any) -> None:
    """Discard the gradients of the parts of a mini-batch that an exception has ended."""
    if hasattr(optimizer, "no_sync"):
        with optimizer.no_sync(discard=True):
            pass


def _add_up(optimizer: Any, is_first: bool, is_last: bool, loss_func: LossFunction, /, *args: Any, **kwds: Any) -> None:
    """Add up the gradients of a part of a mini-batch; after the last one, take a step."""
    if not hasattr(optimizer, "no_sync"):
        if is_first:
            optimizer.target.cleargrads()
        loss_func(*args, **kwds).backward(loss_scale=getattr(optimizer, "_loss_scale", None))
        if is_last:
            optimizer.update()
    elif is_last:
        optimizer.update(loss_func, *args, **kwds)
    else:
        with optimizer.no_sync():
            optimizer.update(loss_func, *args, **kwds)


def _mean(seen: Sequence[tuple[float, Observation]]) -> Observation:
    """Return the weighted means of the values that parts have reported; of values that are not numbers, the last."""
    mean: Observation = {}
    for name in dict.fromkeys(name for _, observation in seen for name in observation):
        pairs = [(share, _plain(observation[name])) for share, observation in seen if name in observation]
        if all(isinstance(value, int | float) or hasattr(value, "dtype") for _, value in pairs):
            mean[name] = sum(share * value for share, value in pairs) / sum(share for share, _ in pairs)
        else:
            mean[name] = pairs[-1][1]
    return mean


def _plain(value: Any) -> Any:
    return value.array if isinstance(value, chainer.Variable) else value
