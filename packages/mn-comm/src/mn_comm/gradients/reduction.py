"""Averaging of the gradients of one backward pass in the background, bucket after bucket."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis.mpi import MPI
from mn_comm.gradients.agree import Selection
from mn_comm.gradients.interfaces import AnyBucket, CommunicationHook
from mn_comm.gradients.parts import Spec
from mn_comm.gradients.targets import Targets
from mn_comm.ranks.background import Future, Worker, once
from mn_comm.ranks.spans import span
from mn_comm.ranks.watch import activity

if TYPE_CHECKING:
    from mn_comm.gradients.layout import Layout
    from mn_comm.ranks.intracomm import Ranks


def average_exactly(bucket: AnyBucket) -> Future[Any]:
    """Average a bucket exactly: the default communication hook."""
    return bucket.launch()


def mean_of(bucket: AnyBucket, future: Any, hook: CommunicationHook | None) -> Any:
    """Return the mean of a bucket, for which a communication hook has returned a future, once it is there.

    Raises:
        TypeError: The hook has returned something other than a future of an array.
        ValueError: The array is not as long as the bucket.
    """
    if hook is average_exactly:
        return future.wait()  # the thread that communicates is watched instead
    if not hasattr(future, "wait"):
        raise TypeError(f"comm_hook: expected a mn_comm.Future, got {type(future).__name__} for bucket {bucket.index}")
    mean = activity().wait_for(future.wait, "comm_hook", None)
    if getattr(mean, "size", None) != bucket.flat.size:
        raise ValueError(
            f"comm_hook: expected a mean of {bucket.flat.size} elements for bucket {bucket.index}, got "
            f"{getattr(mean, 'shape', type(mean).__name__)}"
        )
    return mean


class _Task(Future[Any]):
    """What a hook has submitted; what is to follow it is submitted, too, and so not done twice."""

    def __init__(self, call: Callable[[], Any], worker: Worker, submit: Callable[..., Future[Any]]) -> None:
        self._submit = submit
        super().__init__(call, worker)

    def then(self, function: Callable[[Any], Any]) -> Future[Any]:
        """See :meth:`.Future.then`."""
        return self._submit(lambda: function(self.wait()))


class Reduction:
    """The averaging of the gradients of one backward pass.

    Every parameter is marked once, when its gradient will not change any more. Buckets are sent in the same order on
    all ranks, each as soon as all its gradients, and all previous buckets, are ready. A worker communicates, in the
    same order on all ranks: first the check that all ranks have the same gradients, then the buckets, and finally
    whether a rank has abandoned its backward pass. So :meth:`wait` reports whatever happens on one rank to all ranks.

    A signal handler may raise at any moment, also when the worker has been given a task, and nobody knows it yet. So
    what is interrupted is begun again from its first task, and a task that the worker has done already is not repeated.

    It is created by :meth:`.GradientReducer.start`.
    """

    def __init__(
        self,
        ranks: Ranks,
        worker: Worker,
        check: Callable[[], None],
        find: Callable[[], Layout | None],
        create: Callable[[], Layout],
        selection: Selection,
        comm_hook: CommunicationHook,
        on_end: Callable[[int, bool], None] | None,
        buffer_index: int = 0,
    ) -> None:
        self.buffer_index = buffer_index  # the index of its set of buckets
        # Called by the worker when all buckets are averaged, with the layout's number and whether all ranks succeeded.
        self._on_end = on_end
        self._ranks = ranks
        self._worker = worker
        self._check = once(check)  # checks that all ranks have the same gradients; collective
        self._find = find  # returns the layout, if its buckets have been created
        self._create: Callable[[], Layout] | None = create  # creates them; collective
        self._params = selection.params
        self._hook = comm_hook
        self._agreed: Future[None] | None = None  # the check under way
        self._layout: Layout | None = None
        self._specs: Sequence[Spec] = ()
        self._buckets: Sequence[AnyBucket] = ()
        self._has_begun = False
        self._missing: list[int] = []
        self._bucket_of: dict[str, int] = {}
        # What was submitted for the current bucket, by its index and the position in this order.
        self._calls: dict[tuple[int, int], Callable[[], Any]] = {}
        self._means: list[Any] = []  # futures, or whatever the hook has returned
        self._find_out = once(self._end)
        self._ended: Future[None] | None = None
        self._is_abandoned = False
        self.is_over = False  # whether it has completely finished

    def begin(self) -> None:
        """Let the worker check that all ranks have the same gradients, and find or create the buckets.

        Raises:
            TypeError: A gradient does not hold floats (on every rank).
        """
        self._agreed = Future(self._check, self._worker)
        layout = self._find()
        if layout is None and self._agreed.succeeds():
            create, self._create = self._create, None
            if create is None:  # other ranks have taken part
                raise RuntimeError("expected to create buckets for the first time, got a second attempt")
            layout = create()
        if layout is not None:
            self._layout, self._specs = layout, layout.specs
            self._buckets = layout.buckets(self.buffer_index).buckets
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._bucket_of = {self._params[m][0]: bucket.index for bucket in self._buckets for m in bucket.members}
        self._has_begun = True
        self._create = None  # it holds the gradients

    @property
    def has_left(self) -> bool:
        """Whether all buckets have been passed to the worker."""
        return self._ended is not None

    def ready(self, name: str) -> None:
        """Mark the gradient of the parameter of that name as final."""
        index = self._bucket_of.get(name)
        if index is not None:  # gradients without elements are in no bucket
            self._missing[index] -= 1
            self._launch()

    def ready_all(self) -> None:
        """Mark all gradients as final, also those that are marked already or missing."""
        self._missing = [0] * len(self._buckets)
        self._launch()

    def abandon(self) -> None:
        """Inform the other ranks that this one's backward pass has failed; their :meth:`wait` then raises.

        The remaining buckets are still sent, whatever they contain: the other ranks may be waiting for them.
        """
        if self._ended is None:
            self._is_abandoned = True
            with contextlib.suppress(Exception):  # a hook may fail on missing gradients
                if not self._has_begun:
                    self.begin()
                self.ready_all()

    def agree(self) -> None:
        """Wait until it is known that all ranks have the same gradients; otherwise raise ValueError on every rank."""
        assert self._agreed is not None
        self._agreed.wait()

    def expect_shapes(self) -> None:
        """Raise ``ValueError`` if a parameter has changed its shape since its gradient was packed; not collective."""
        for (name, param), (_, shape, _) in zip(self._params, self._specs, strict=True):
            if param.data is not None and param.data.shape != shape:
                raise ValueError(
                    f"expected {name} to keep its shape {shape} until the mean of its gradient is applied, one step "
                    f"later; got {param.data.shape}"
                )

    def wait(self) -> None:
        """Wait until all buckets are averaged, and write the means to the gradients.

        Raises:
            ValueError: The ranks have different gradients (on every rank).
            RuntimeError: A rank has abandoned its backward pass (on every other rank); or this reduction was waited for
                before.
        """
        if self.is_over:
            raise RuntimeError("expected a reduction that is under way, got one that was waited for already")
        self.agree()
        means = []
        for bucket, mean in zip(self._buckets, self._means, strict=True):
            with span("wait", bucket=bucket.index):
                means.append(mean_of(bucket, mean, self._hook))
        assert self._ended is not None
        self._ended.wait()
        self.is_over = True  # not earlier: after an exception, running operations still have to be waited for
        grads = [param.grad for _, param in self._params]
        for i, (grad, (_, *spec)) in enumerate(zip(grads, self._specs, strict=True)):
            if grad is not None and [grad.shape, grad.dtype] != spec:
                grads[i] = None  # it has changed since it was packed, one backward pass ago
        targets = Targets(self._params, grads, self._specs)
        for bucket, mean in zip(self._buckets, means, strict=True):
            with span("unpack", bucket=bucket.index, bytes=bucket.nbytes), np.errstate(all="ignore"):
                bucket.unpack(targets.arrays, mean)
        targets.finish()

    def drain(self) -> None:
        """Wait until it has finished, and discard the results."""
        self.abandon()
        self.abandon()  # if a signal handler has raised, not the hook, the rest is sent now
        for future in (self._agreed, *self._means, self._ended):
            if isinstance(future, Future):
                future.succeeds()
            elif future is not None:
                with contextlib.suppress(Exception):
                    future.wait()
        self.is_over = True

    def _launch(self) -> None:
        assert self._agreed is not None
        while len(self._means) < len(self._buckets) and not self._missing[len(self._means)]:
            bucket = self._buckets[len(self._means)]
            if bucket.needs_agreement and not self._agreed.succeeds():
                return  # wait() will raise the exception
            if not self._is_abandoned:
                with span("pack", bucket=bucket.index, bytes=bucket.nbytes), np.errstate(all="ignore"):
                    bucket.pack({member: self._params[member][1].grad for member in bucket.members})
            bucket.submit = functools.partial(self._submit, bucket, itertools.count())
            try:
                with span("launch", bucket=bucket.index):
                    self._means.append(self._hook(bucket))
            finally:
                bucket.submit = Future  # if the hook has more to do, it does it in the worker
            self._calls.clear()
        if self._ended is None and len(self._means) == len(self._buckets):
            self._ended = Future(self._find_out, self._worker)

    def _submit(self, bucket: AnyBucket, positions: Iterator[int], function: Callable[[], Any]) -> Future[Any]:
        """Make the worker call a function once, unless the ranks have different gradients."""
        if self._worker.is_caller:
            return Future(function)  # what the hook does later, while it has not returned yet

        def communicate() -> Any:
            self.agree()
            with span("communicate", bucket=bucket.index, bytes=bucket.nbytes):
                return function()

        call = self._calls.setdefault((bucket.index, next(positions)), once(communicate))
        return _Task(call, self._worker, functools.partial(self._submit, bucket, positions))

    def _end(self) -> None:
        """Find out whether a rank has abandoned its backward pass; collective."""
        self.agree()
        abandoned_by = np.array([self._ranks.rank + 1 if self._is_abandoned else 0], np.int32)
        self._ranks.Allreduce(MPI.IN_PLACE, abandoned_by, MPI.MAX)
        if self._on_end is not None and self._layout is not None:
            self._on_end(self._layout.number, not abandoned_by[0])
        if abandoned_by[0]:
            raise RuntimeError(
                f"rank {abandoned_by[0] - 1} has abandoned its backward pass because of an exception: there are no "
                "averaged gradients"
            )
