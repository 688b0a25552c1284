"""Evaluators that all ranks run together: their results are averaged, or combined as a subclass defines."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda
from chainer.dataset import concat_examples
from chainer.dataset.convert import _call_converter  # a number or a Device, as the converter needs it; not public
from chainer.training import PRIORITY_WRITER, Extension
from chainer.training.extensions import Evaluator

from mn_comm import CommunicatorBase, raise_on_all, transact
from mn_comm.building_blocks import synchronize_replicas

Results = dict[str, Any]
# The reported values under each name, each with the number of samples of which it is the mean.
Weighted = dict[str, list[tuple[Any, int]]]


def create_multi_node_evaluator(
    actual_evaluator: Evaluator, communicator: CommunicatorBase, *, weighted: bool = False
) -> Evaluator:
    """Make an evaluator report the mean over all ranks.

    All ranks evaluate the same parameters: with local or asynchronous steps, the optimizer is synchronised first.

    Args:
        actual_evaluator: An evaluator, or one of a class derived from it, whose iterator goes through this rank's part
            of the samples. Its ``evaluate`` is replaced.
        communicator: The ranks that evaluate together.
        weighted: Whether every sample has the same weight, however many samples each rank and each mini-batch has. If
            the parts share no sample (``scatter_dataset(…, force_equal_length=False)``), the result is then that of one
            process on all samples, and does not depend, bit for bit, on how they are divided. Otherwise every rank has
            the same weight, and every mini-batch within a rank, as in ChainerMN 7. An evaluator that overrides
            ``evaluate`` is expected to return means over its samples.

    Returns:
        ``actual_evaluator`` itself. Its ``evaluate`` is now collective, and returns and reports the mean under each
        name; a rank without a value under a name does not count in the mean. The original method is
        ``_mn_original_evaluate``, and the communicator is ``_mn_communicator``, as in ChainerMN 7: scripts may replace
        both.

    Raises:
        TypeError: ``actual_evaluator`` has no ``evaluate``. If evaluating raises an exception on one rank, all ranks
            raise.
        ValueError: ``actual_evaluator`` is a multi-node evaluator already.

    Example:
        >>> model = L.Classifier(L.Linear(3, 2))
        >>> samples = chainer.datasets.TupleDataset(np.ones((4, 3), np.float32), np.zeros(4, np.int32))
        >>> iterator = chainer.iterators.SerialIterator(samples, 2, repeat=False, shuffle=False)
        >>> evaluator = chainer.training.extensions.Evaluator(iterator, model)
        >>> evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
        >>> sorted(evaluator())
        ['main/accuracy', 'main/loss']
    """
    if not callable(getattr(actual_evaluator, "evaluate", None)):
        raise TypeError(
            "expected a chainer.training.extensions.Evaluator for actual_evaluator, got "
            f"{type(actual_evaluator).__name__}: {actual_evaluator!r:.80}"
        )
    if "_mn_original_evaluate" in vars(actual_evaluator):
        raise ValueError("expected an evaluator for actual_evaluator that is not a multi-node evaluator already")
    actual_evaluator._mn_original_evaluate = actual_evaluator.evaluate  # noqa: SLF001 - the names are the old ones
    actual_evaluator._mn_communicator = communicator  # noqa: SLF001

    def evaluate(evaluator: Evaluator) -> Results:
        return _evaluate_on_all(evaluator, weighted)

    # Replaced on the object, not in a wrapper: scripts use the evaluator that they created, and their own classes call
    # self.evaluate().
    actual_evaluator.evaluate = MethodType(evaluate, actual_evaluator)
    return actual_evaluator


class GenericMultiNodeEvaluator(Extension):  # type: ignore[misc]  # Chainer has no types
    """Evaluates on every rank and combines the results on one, as its subclasses define.

    Override :meth:`calc_local` and :meth:`aggregate`. Parts may differ in length, and be empty. Nothing is reported
    unless :meth:`aggregate` does so.

    Args:
        comm: The ranks that evaluate together.
        iterator: Goes once through this rank's part of the samples.
        target: The model, or any other callable.
        device: Where ``converter`` puts the mini-batches.
        converter: Converts a mini-batch to the arguments of :meth:`calc_local`.
        root: The rank that combines the results.
        progress_hook: Called on the root with each of its mini-batches, after it was evaluated.

    Raises:
        ValueError: ``root`` is out of range.

    Example:
        >>> class Total(chainermn.extensions.GenericMultiNodeEvaluator):
        ...     def calc_local(self, x):
        ...         return float(x.sum())
        ...     def aggregate(self, results):
        ...         return sum(results)
        >>> ones = chainer.iterators.SerialIterator([np.ones(3)] * 4, 2, repeat=False, shuffle=False)
        >>> Total(comm, ones, target=L.Linear(3, 1))(None) == (24.0 if comm.rank == 0 else None)
        True
    """

    trigger = 1, "epoch"
    default_name = "validation"
    priority = PRIORITY_WRITER
    name = None

    def __init__(
        self,
        comm: CommunicatorBase,
        iterator: Any,
        target: Callable[..., Any],
        device: Any = None,
        converter: Callable[..., Any] = concat_examples,
        root: int = 0,
        *,
        progress_hook: Callable[[Any], object] | None = None,
    ) -> None:
        if not 0 <= root < comm.size:
            raise ValueError(f"expected root in 0..{comm.size - 1}, got {root}")
        self.comm = comm
        self.iterator = iterator
        self.converter = converter
        self.device = None if device is None else chainer.get_device(device)
        self.root = root
        self._targets = {"main": target}
        self._progress_hook = progress_hook

    def __call__(self, trainer: Any) -> Any:
        """Evaluate; collective.

        Args:
            trainer: Not used.

        Returns:
            At the root what :meth:`aggregate` returned, elsewhere ``None``.

        Raises:
            Exception: The exception that one of the methods raised on some rank (on every rank).
        """
        return transact(self.comm, self._evaluate)

    def _evaluate(self) -> Any:
        _synchronize_targets(self._targets)
        with raise_on_all(self.comm):
            results = [result for result in self._local_results() if result is not None]
        gathered = self.comm.gather_obj(results, root=self.root)
        total = None
        with raise_on_all(self.comm):
            if gathered is not None:
                # Alternating: the first result of each rank, in the order of ranks, then the second of each, and so on.
                in_turn = itertools.chain.from_iterable(itertools.zip_longest(*gathered))
                total = self.aggregate([result for result in in_turn if result is not None])
        return total

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of one mini-batch, something that can be pickled; by default what the target returns.

        Args:
            args: The result of the converter, if it is a tuple or a single argument.
            kwargs: The result of the converter, if it is a dictionary.
        """
        return self._targets["main"](*args, **kwargs)

    def aggregate(self, results: list[Any]) -> Any:
        """Return the result of all mini-batches of all ranks; called at the root only. By default the list itself.

        Args:
            results: The results of :meth:`calc_local`, without ``None``: the first result of each rank in the order of
                ranks, then the second of each, and so on.
        """
        return results

    def _local_results(self) -> Iterator[Any]:
        for batch in _batches_of(self.iterator):
            with chainer.no_backprop_mode():
                result = _call(self.calc_local, _convert(self, batch))
            if self._progress_hook is not None and self.comm.rank == self.root:
                self._progress_hook(batch)
            yield result


def _evaluate_on_all(evaluator: Evaluator, weighted: bool) -> Results:
    """Return the means over all ranks; collective."""
    evaluate, communicator = evaluator._mn_original_evaluate, evaluator._mn_communicator  # noqa: SLF001

    def attempt() -> Results:
        _synchronize_targets(getattr(evaluator, "get_all_targets", dict)())
        with raise_on_all(communicator):
            results = _with_weights(evaluator, evaluate) if weighted else _plain(evaluator, evaluate)
        everywhere = communicator.allgather_obj(results)
        if not weighted:
            return plain_mean(everywhere)
        names = sorted({name for each in everywhere for name in each})
        return {name: weighted_mean([pair for each in everywhere for pair in each.get(name, [])]) for name in names}

    return transact(communicator, attempt)


def _plain(evaluator: Evaluator, evaluate: Callable[[], Results]) -> Results:
    """Return this rank's results; none if it has no samples, unless the evaluator's own method handles that."""
    if _is_chainers(evaluate) and not _has_samples(evaluator.get_iterator("main")):
        return {}
    return {name: on_host(value) for name, value in evaluate().items()}


def _is_chainers(evaluate: Callable[[], Results]) -> bool:
    return getattr(evaluate, "__func__", None) is Evaluator.evaluate


def _has_samples(iterator: Any) -> bool:
    """Return whether there are mini-batches; Chainer's iterators divide by the length of their dataset."""
    return len(getattr(iterator, "dataset", (None,))) > 0


def _synchronize_targets(targets: Mapping[str, Any]) -> None:
    """Make some models' parameters equal on all ranks if an optimizer lets them differ temporarily; collective."""
    for _, target in sorted(targets.items()):
        if hasattr(target, "namedparams"):
            synchronize_replicas(target)


def on_host(value: Any) -> Any:
    """Return an array on a GPU in host memory, and anything else, such as a number or text, unchanged."""
    return cuda.to_cpu(value) if hasattr(value, "shape") and not isinstance(value, np.generic) else value


def plain_mean(results: Sequence[Results]) -> Results:
    """Return, under each name, the mean of the ranks' results, added up in the order of ranks."""
    names = sorted({name for each in results for name in each})
    columns = {name: [each[name] for each in results if name in each] for name in names}
    return {name: mean_of(column) for name, column in columns.items()}


def mean_of(values: Sequence[Any]) -> Any:
    """Return the mean of numbers or arrays, added up in their order; half precision in float32, also the mean."""
    wide = [value.astype(np.float32) if getattr(value, "dtype", None) == np.float16 else value for value in values]
    return sum(wide) / len(wide)


def weighted_mean(pairs: Sequence[tuple[Any, int]]) -> Any:
    """Return the mean of values, weighted by the number of samples of each.

    Args:
        pairs: Numbers or arrays of one shape, each with its weight.

    Returns:
        The mean, of the dtype of the values. The mean of finite numbers is computed from the exact sum and rounded
        once, so that their order does not matter; products of float32 with fewer than 2**29 samples are exact.
    """
    total = sum(weight for _, weight in pairs)
    values = [np.asarray(value) for value, _ in pairs]
    products = [
        value.astype(np.result_type(value, "f8")) * weight for value, (_, weight) in zip(values, pairs, strict=True)
    ]
    is_exact = all(product.ndim == 0 and np.isrealobj(product) and np.isfinite(product) for product in products)
    with np.errstate(invalid="ignore"):  # infinities of both signs
        mean = np.asarray(math.fsum(products) / total if is_exact else sum(products) / total)
    dtype = np.result_type(*values)
    return mean.astype(dtype)[()] if dtype.kind in "fc" else mean[()]


def _with_weights(evaluator: Evaluator, evaluate: Callable[[], Results]) -> Weighted:
    """Return this rank's results, each with the number of its samples: by mini-batch where that is possible."""
    if _is_chainers(evaluate):
        return _by_batch(evaluator)
    n_samples = len(evaluator.get_iterator("main").dataset)
    results = evaluate() if n_samples else {}
    return {name: [(cuda.to_cpu(value), n_samples)] for name, value in results.items()}


def _by_batch(evaluator: Evaluator) -> Weighted:
    """Evaluate as Chainer's evaluator does, but keep what each mini-batch reports."""
    if evaluator.eval_hook:
        evaluator.eval_hook(evaluator)
    evaluate = evaluator.eval_func or evaluator.get_target("main")
    collected: Weighted = {}
    for batch in _batches_of(evaluator.get_iterator("main")):
        observation: Results = {}
        with chainer.reporter.report_scope(observation), chainer.no_backprop_mode():
            _call(evaluate, _convert(evaluator, batch))
        for name, value in observation.items():
            array = value.array if isinstance(value, chainer.Variable) else value
            collected.setdefault(name, []).append((cuda.to_cpu(array), len(batch)))
    return collected


def _batches_of(iterator: Any) -> Iterator[Any]:
    """Yield the mini-batches of one pass; there are none if the dataset is empty."""
    if _has_samples(iterator):
        if hasattr(iterator, "reset"):
            iterator.reset()
        else:
            iterator = copy.copy(iterator)
        # Some have only the method next, which is what the ChainerMN in Chainer calls.
        yield from iterator if hasattr(iterator, "__iter__") else iter(iterator.next, object())


def _convert(evaluator: Any, batch: Any) -> Any:
    """Convert a mini-batch with an evaluator's converter; plain functions get the number of the device."""
    return _call_converter(evaluator.converter, batch, evaluator.device)


def _call(function: Callable[..., Any], arguments: Any) -> Any:
    """Call a function with the result of a converter: a tuple, a dictionary, or a single argument."""
    if isinstance(arguments, tuple):
        return function(*arguments)
    if isinstance(arguments, dict):
        return function(**arguments)
    return function(arguments)
