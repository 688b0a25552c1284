"""The gradient reducer: one object per model, which owns its buckets for the model's whole life."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm import agreement
from mn_comm.arithmetic import is_half
from mn_comm.config import Config
from mn_comm.gradients.agree import ON_DEVICE, Agreement, Signature, signature_of
from mn_comm.gradients.bucket import AnyBucket, Spec, count, make_buckets
from mn_comm.gradients.in_place import InPlaceBucket, is_streamed
from mn_comm.gradients.round import Launch, Round
from mn_comm.gradients.select import select
from mn_comm.intra import Buffer
from mn_comm.protocols import Model
from mn_comm.strategies import Strategy
from mn_comm.timeline import record

__all__ = ["GradientReducer"]


class GradientReducer:
    """Averages the gradients of one model over all ranks, again and again.

    :meth:`average` does it at once. :meth:`start` begins a :class:`~mn_comm.gradients.round.Round`, which is told of
    gradients as they become final, and waited for when they are needed: during the same step to overlap with the
    backward pass, or one step later.

    Args:
        mpi_comm: The communicator whose ranks hold replicas of the model.
        strategy: How one buffer is averaged.
        config: Returns the communicator's settings.
        launch: How a bucket is sent on its way; by default it is averaged at once, for rounds that are marked as ready
            after the backward pass only.
        bucket_bytes: Of how many bytes a bucket may be, if it holds more than one gradient; ``None`` for any number.
        sets: How many rounds may be under way at a time; each has buckets of its own.
    """

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        strategy: Strategy,
        config: Callable[[], Config],
        *,
        launch: Launch | None = None,
        bucket_bytes: int | None = None,
        sets: int = 1,
    ) -> None:
        self._strategy = strategy
        self._config = config
        self._launch = launch
        self._bucket_bytes = 0 if strategy.one_bucket_each else bucket_bytes
        self._mpi_comm = mpi_comm
        self._agreement = Agreement(mpi_comm, "multi_node_mean_grad")
        self._layout: tuple[Any, ...] = ()
        self._sets: list[list[AnyBucket]] = [[] for _ in range(sets)]

    def average(self, model: Model, zero_fill: bool) -> None:
        """Replace every gradient by its mean over all ranks; collective.

        Args:
            model: The model, after its backward pass.
            zero_fill: As for :func:`~mn_comm.gradients.select.select`.

        Raises:
            ValueError: The ranks' gradients differ in names, shapes or dtypes (on every rank).
            TypeError: A gradient does not hold floats (on every rank).
        """
        current, grads = self._begin(model, zero_fill, ())
        current.grads = grads
        current.ready_all()
        current.wait()

    def start(self, model: Model, zero_fill: bool, order: Sequence[str] = ()) -> Round:
        """Begin to average the gradients of one backward pass; collective.

        Args:
            model: The model. If ``zero_fill``, its gradients may still be to come.
            zero_fill: As for :func:`~mn_comm.gradients.select.select`.
            order: The names of parameters in the order in which their gradients are expected to become final, the same
                on every rank; those that are not named follow, sorted by name.

        Returns:
            The round. At most as many as there are sets may be under way.

        Raises:
            ValueError: The ranks' gradients differ in names, shapes or dtypes, where that shows already (on every
                rank).
            TypeError: A gradient does not hold floats (on every rank).
        """
        return self._begin(model, zero_fill, order)[0]

    def _begin(self, model: Model, zero_fill: bool, order: Sequence[str]) -> tuple[Round, Sequence[Any]]:
        """Begin a round; return the gradients that there are now as well."""
        params, likes, grads = select(model, zero_fill)
        signature = signature_of(zip([name for name, _ in params], likes, strict=True))
        signature = self._agreement.start(signature)
        layout = (signature, self._config().allreduce_grad_dtype, tuple(order))
        if layout != self._layout:
            self._agreement.finish()
            self._lay_out(signature, likes, order)
            self._layout = layout
        self._sets.append(self._sets.pop(0))
        launch = self._launch or self._average_now
        if record.active is None:
            return Round(params, self._sets[-1], self._agreement, launch), grads
        from mn_comm.gradients.recorded import recorded_round

        strategy = type(self._strategy).__name__
        in_background = self._launch is not None
        return recorded_round(params, self._sets[-1], self._agreement, launch, strategy, in_background), grads

    def _lay_out(self, signature: Signature, likes: Sequence[Any], order: Sequence[str]) -> None:
        """Make buckets, to be kept for as long as the gradients keep their names, shapes, dtypes and places."""
        for name, _, dtype, *_ in signature:
            if not _is_float(dtype):
                raise TypeError(f"multi_node_mean_grad: expected gradients of floats, got dtype {dtype} for {name}")
        specs = [(shape, dtype) for _, shape, dtype, *_ in signature]
        positions = _positions([entry[0] for entry in signature], order)
        on_device = {i for i, entry in enumerate(signature) if ON_DEVICE in entry[3:]}
        device = self._device_of([likes[i] for i in sorted(on_device)]) if on_device else None
        for i in range(len(self._sets)):
            self._sets[i] = []  # first: the memory of the old buckets may be needed for the new
            self._sets[i] += self._make_host_buckets(specs, [p for p in positions if p not in on_device])
            if device is not None:
                with device:
                    self._sets[i] += self._make_device_buckets(specs, [p for p in positions if p in on_device])

    def _make_host_buckets(self, specs: Sequence[Spec], positions: Sequence[int]) -> list[AnyBucket]:
        wire_dtype = self._config().allreduce_grad_dtype
        in_place = self._make_in_place_buckets(specs, positions, wire_dtype)
        held = {member for bucket in in_place for member in bucket.members}
        packed = [p for p in positions if p not in held]
        return [*in_place, *make_buckets(specs, packed, self._bucket_bytes, wire_dtype, self._strategy.allocate)]

    def _make_in_place_buckets(
        self, specs: Sequence[Spec], positions: Sequence[int], wire_dtype: np.dtype[Any] | None
    ) -> list[InPlaceBucket]:
        # During the backward pass other functions may still read the array that is some parameter's gradient, and in
        # the background the next pass may write to it.
        if self._launch is not None:
            return []
        groups: dict[np.dtype[Any], list[int]] = {}
        for position in positions:
            if is_streamed(specs[position], wire_dtype):
                groups.setdefault(specs[position][1], []).append(position)
        buckets = []
        for dtype, group in groups.items():
            members = [specs[position] for position in group]
            streamed = self._strategy.streamed([count(shape) for shape, _ in members], dtype)
            if streamed is not None:
                buckets.append(InPlaceBucket(group, members, streamed))
        return buckets

    def _make_device_buckets(self, specs: Sequence[Spec], positions: Sequence[int]) -> list[AnyBucket]:
        from mn_comm.device.bucket import DeviceBucket

        config = self._config  # not self: a cycle would keep the device's memory until it is collected
        kind = functools.partial(DeviceBucket, batched=lambda: config().batched_copy)
        # Chosen here, not earlier: which devices the ranks use is known only now.
        allocate = self._strategy.on_device().allocate
        wire_dtype = config().allreduce_grad_dtype
        return list(make_buckets(specs, positions, self._bucket_bytes, wire_dtype, allocate, kind))

    def _device_of(self, arrays: Sequence[Any]) -> Any:
        """Return the device that this rank's arrays are on; raise on every rank if some rank's are on several."""
        devices = {array.device.id: array.device for array in arrays}
        with agreement.together(self._mpi_comm):
            if len(devices) > 1:
                raise ValueError(f"multi_node_mean_grad: expected gradients on one device, got {sorted(devices)}")
        return next(iter(devices.values()))

    def _average_now(self, buffer: Any) -> Callable[[], object]:
        if isinstance(buffer, Buffer):
            self._strategy.average(buffer)
        else:
            buffer.average()
        return _nothing_to_wait_for


def _nothing_to_wait_for() -> None:
    pass


def _positions(names: Sequence[str], order: Sequence[str]) -> list[int]:
    """Return the positions of ``names``, those that ``order`` names first, in its order."""
    position_of = {name: position for position, name in enumerate(names)}
    return list(dict.fromkeys([position_of[name] for name in order if name in position_of] + list(range(len(names)))))


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or is_half(dtype)
