"""The gradient reducer: an object that averages the gradients of one model, in every step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mn_comm.basis.config import Config
from mn_comm.basis.protocols import Model
from mn_comm.gradients.agree import Agreement, Selection, expect_same_arrays, outline, select, sorted_parameters
from mn_comm.gradients.filling import Owners
from mn_comm.gradients.interfaces import CommunicationHook, JoinMessages
from mn_comm.gradients.layout import Layout, Layouts, check_gradients
from mn_comm.gradients.reducer_state import ReducerState
from mn_comm.gradients.reduction import Reduction, average_exactly, mean_of
from mn_comm.gradients.signature import FAILURE, OWNERS, Signature, signature_of
from mn_comm.gradients.targets import Targets
from mn_comm.ranks.agreement import describe, digest
from mn_comm.ranks.background import Future, Worker
from mn_comm.ranks.spans import span
from mn_comm.ranks.watch import activity

if TYPE_CHECKING:
    from mn_comm.gradients.strategy import Strategy

# A signature begins with the settings, and the owners of means.
_N_SETTINGS = len(Config._fields) + 1


class GradientReducer(ReducerState):
    """Averages the gradients of one model over all ranks, in every step.

    :meth:`average` averages immediately. :meth:`start` begins a :class:`Reduction`, which is notified when gradients
    become final, and waited for when the means are needed: in the same step, to overlap with the backward pass, or one
    step later.

    Args:
        strategy: How one bucket is averaged.
        config: Returns the communicator's settings.
        worker: The thread that communicates for :meth:`start`; ``None`` for a reducer that only averages immediately.
        comm_hook: Starts to average a bucket in its own way; ``None`` to average exactly.
        bucket_bytes: The maximum size of a bucket that holds more than one gradient; ``None`` for a suitable one.
        sets: How many reductions may run at the same time; each has its own buckets.

    Attributes:
        join: The messages of a join, on every rank or on none; ``None`` outside. They are exchanged with the check of
            the gradients, without additional communication while no rank has news. What receiving them raises is
            raised by :meth:`average`, or by waiting for the reduction that :meth:`start` has begun.
    """

    def __init__(
        self,
        strategy: Strategy,
        config: Callable[[], Config],
        *,
        worker: Worker | None = None,
        comm_hook: CommunicationHook | None = None,
        bucket_bytes: int | None = None,
        sets: int = 1,
    ) -> None:
        self._config = config
        self._hook = comm_hook
        self._bucket_bytes = bucket_bytes
        self._sets = sets
        self.join: JoinMessages | None = None
        self.use(strategy, worker)

    def use(self, strategy: Strategy, worker: Worker | None) -> None:
        """Continue with other ranks, and discard what was created for the old ones; call it on every rank."""
        self._strategy = strategy
        self._worker = worker
        self._agreement = Agreement(strategy.context.ranks, "multi_node_mean_grad")
        self._seen: tuple[object, ...] = ()
        self._signature: Signature = ()
        self._layouts = Layouts()
        self._use_compressor(strategy.compressor)
        self._under_way: list[Reduction] = []
        self._averaged: Layout | None = None
        self._notes = (0, 0)

    @property
    def can_leave_to_owners(self) -> bool:
        """Whether each mean can be sent to one rank only; a hook or compression returns all means."""
        return self._hook is None and self._compressor is None and self._strategy.communicates

    def average(self, model: Model, zero_fill: bool = False, owners: Owners | None = None) -> None:
        """Replace every gradient by its mean over all ranks, in place; collective.

        Args:
            model: The model, after its backward pass.
            zero_fill: Whether an initialised parameter without a gradient takes part, with a gradient of zeros.
            owners: Which rank alone is given the mean of which gradient, if it is in host memory; on other ranks, the
                gradient may stay as it is. ``None`` to give all means to all ranks.

        Raises:
            ValueError: The ranks' gradients differ in names, shapes or dtypes (on every rank).
            TypeError: A gradient does not hold floats (on every rank).
            Exception: Receiving the messages of a join raised it.
        """
        selection, signature, failure = self._select(model, zero_fill, owners)
        layout = self._layouts.find(signature)
        with span("agree"):
            number, proposal = (layout.number, layout.share_size.proposal) if layout is not None else (0, 0)
            notes = (*self._notes, number, -number, proposal)
            try:
                *slowest, highest, negative_of_lowest, choice = self._agreement.check(signature, notes, self.join)
            finally:
                if failure is not None:
                    raise failure
        if self._averaged is not None:
            self._averaged.share_size.record(*slowest)
        if layout is None or highest != -negative_of_lowest:  # created on every rank, or on none
            layout = self._make_layout(signature, selection, (), owners)
        layout.share_size.used = choice
        self._averaged = layout
        buckets, flattened = layout.buckets()  # before the clock starts: creating them takes long, and is done once
        doing = activity()
        began, waited = time.perf_counter_ns(), doing.waited
        if self._compressor is not None:
            self._compressor.roll_back()  # what an exception may have left
            self._use_factor(self.join)
        with span("communicate", bytes=layout.nbytes, strategy=self._strategy.name), np.errstate(all="ignore"):
            targets = Targets(selection.params, selection.grads, layout.specs, flattened if self._hook is None else ())
            for bucket in buckets:
                if self._hook is None:
                    bucket.average_in_place(targets.arrays)
                else:
                    bucket.pack(targets.arrays)
                    bucket.unpack(targets.arrays, mean_of(bucket, self._hook(bucket), self._hook))
            if self._compressor is not None:
                self._end(layout.number, True)
            targets.finish()
        self._notes = (time.perf_counter_ns() - began, doing.waited - waited)

    def start(
        self, model: Model, zero_fill: bool = True, order: Sequence[str] = (), owners: Owners | None = None
    ) -> Reduction:
        """Begin to average the gradients of one backward pass; collective.

        Args:
            model: The model. With ``zero_fill``, its gradients may be missing until later.
            zero_fill: Whether a missing gradient counts as a gradient of zeros; otherwise it is omitted.
            order: The names of parameters in the order in which their gradients are expected to become final, the same
                on every rank; those that are not named follow, sorted by name.
            owners: Which rank alone is given the mean of which gradient; see :meth:`average`.

        Returns:
            The reduction. Earlier ones that an exception has left unfinished are waited for and discarded.

        Raises:
            TypeError: A gradient does not hold floats (on every rank).
        """
        if self._worker is None:
            raise RuntimeError("expected a reducer made with background=True, got one that averages at once")
        self._under_way = [each for each in self._under_way if not each.is_over]
        while len(self._under_way) >= self._sets or any(not each.has_left for each in self._under_way):
            self._under_way[0].drain()
            del self._under_way[0]  # not before: if a signal handler has raised, its memory is still in use
        selection, signature, failure = self._select(model, zero_fill, owners)
        # Not every second one: a reduction that ends before it has begun, because a rank had news, counts on some ranks
        # only.
        buffer_index = min({*range(self._sets)} - {each.buffer_index for each in self._under_way})

        reduction = Reduction(
            self._strategy.context.ranks,
            self._worker,
            functools.partial(self._check_and_scale, signature, self.join),
            functools.partial(self._find_layout, signature, tuple(order), buffer_index),
            functools.partial(self._create_layout, signature, selection, tuple(order), owners, buffer_index),
            selection,
            self._hook or average_exactly,
            None if self._compressor is None else self._end,
            buffer_index,
        )
        self._under_way.append(reduction)  # whatever is raised from now on: the other ranks count on it
        try:
            reduction.begin()
        except BaseException:
            reduction.abandon()
            raise
        if failure is not None:
            raise failure
        return reduction

    def exchange_messages(self, until_quiet: bool = False) -> None:
        """Exchange messages of a join at the other ranks' next averaging, instead of averaging; collective with that.

        With ``until_quiet``, all ranks call this instead of averaging, and continue only when none has news.

        Raises:
            RuntimeError: This reducer is in no join.
            Exception: Receiving the messages raised it.
        """
        if self.join is None:
            raise RuntimeError("expected messages of a join to exchange, got none: set GradientReducer.join")
        join = self.join
        Future(lambda: self._agreement.exchange(join, until_quiet), self._worker).wait()

    def agree_on(self, operation: str, model: Model | None = None) -> None:
        """Raise on every rank unless all ranks call this with the same arguments, rather than average; collective.

        ``operation`` says what comes next, for messages. The parameters of the model, if any, must be the same on all
        ranks in names, shapes and dtypes.

        Raises:
            ValueError: The ranks' operations or parameters differ; the message names the first parameter that does.
        """
        named = [] if model is None else [(name, param.data) for name, param in sorted_parameters(model)]
        ranks = self._strategy.context.ranks
        Future(lambda: expect_same_arrays(ranks, operation, named, self.join), self._worker).wait()

    def drain(self) -> None:
        """Wait until running reductions have finished or failed, and discard them."""
        for reduction in self._under_way:
            if not reduction.is_over:
                reduction.drain()
        self._under_way.clear()

    def _check_and_scale(self, signature: Signature, join: JoinMessages | None) -> None:
        self._agreement.check(signature, join=join)
        if self._compressor is not None:
            self._use_factor(join)

    def _select(
        self, model: Model, zero_fill: bool, owners: Owners | None
    ) -> tuple[Selection, Signature, Exception | None]:
        """Return the gradients that take part, their signature, and this rank's exception or ``None``."""
        try:
            selection = select(model, zero_fill)
        except Exception as error:
            return Selection([], [], []), ((FAILURE, *describe(error)),), error
        return selection, self._signature_of(selection, owners), None

    def _signature_of(self, selection: Selection, owners: Owners | None) -> Signature:
        """Return the signature: settings, then gradients; the same object as before if nothing has changed."""
        config = self._config()
        names = [name for name, _ in selection.params]
        seen = (config, owners, outline(names, selection.likes))
        if seen != self._seen:
            gradients = signature_of(zip(names, selection.likes, strict=True))
            settings = list(config.get().items())
            settings.append((OWNERS, owners and (digest(sorted(owners.of.items())), owners.note)))
            self._seen, self._signature = seen, (*settings, *gradients)
        return self._signature

    def _find_layout(self, signature: Signature, order: tuple[str, ...], buffer_index: int) -> Layout | None:
        """Return the layout of these gradients if it has created these buckets."""
        layout = self._layouts.find(signature, order)
        return layout if layout is not None and layout.has_buckets(buffer_index) else None

    def _create_layout(
        self,
        signature: Signature,
        selection: Selection,
        order: tuple[str, ...],
        owners: Owners | None,
        buffer_index: int,
    ) -> Layout:
        """Create a layout of these gradients, if there is none, and these buckets; collective."""
        layout = self._layouts.find(signature, order)
        if layout is None:
            layout = self._make_layout(signature, selection, order, owners)
        layout.buckets(buffer_index)
        return layout

    def _make_layout(
        self, signature: Signature, selection: Selection, order: tuple[str, ...], owners: Owners | None
    ) -> Layout:
        """Create a layout for these gradients; collective."""
        entries = signature[_N_SETTINGS:]
        check_gradients(entries, self._strategy)
        is_foreground = self._hook is None and self._worker is None
        bucket_bytes = self._bucket_bytes if self._strategy.packs else 0
        layout = Layout(
            self._strategy,
            entries,
            selection.likes,
            order,
            self._config(),
            bucket_bytes=bucket_bytes,
            whole=not is_foreground or bucket_bytes is not None,
            lasting=not is_foreground,
            owners=owners,
        )
        if self._compressor is not None:
            self._adopt(layout)
        self._layouts.add(layout, signature, order)
        return layout
