"""An evaluator for results that are not means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from typing import Any

import chainer
from chainer.dataset import concat_examples
from chainer.training import PRIORITY_WRITER, Extension

from mn_comm import CommunicatorBase, raise_on_all, transact
from mn_extensions.evaluator import batches_of, call, convert, synchronize_targets

__all__ = ["GenericMultiNodeEvaluator"]


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
        synchronize_targets(self._targets)
        with raise_on_all(self.comm):
            results = [result for result in self._local_results() if result is not None]
        gathered = self.comm.gather_obj(results, root=self.root)
        total = None
        with raise_on_all(self.comm):
            if gathered is not None:
                # Alternating: the first result of each rank, in the order of ranks, then the second of each, and so on.
                in_turn = chain.from_iterable(zip_longest(*gathered))
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
        for batch in batches_of(self.iterator):
            with chainer.no_backprop_mode():
                result = call(self.calc_local, convert(self, batch))
            if self._progress_hook is not None and self.comm.rank == self.root:
                self._progress_hook(batch)
            yield result
