"""The gradient's way when a timeline is kept: the same steps, each a span. Without one nothing of this is imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mn_comm.gradients.agree import Agreement
from mn_comm.gradients.bucket import AnyBucket
from mn_comm.gradients.round import Launch, Round
from mn_comm.gradients.select import Named
from mn_comm.timeline import record, span
from mn_comm.timeline.record import recorded

__all__ = ["RecordedThread", "recorded_round"]


def recorded_round(
    params: Sequence[Named],
    buckets: Sequence[AnyBucket],
    agreement: Agreement,
    launch: Launch,
    strategy: str,
    in_background: bool,
) -> Round:
    """Return a round whose steps are spans.

    Args:
        params: As for :class:`~mn_comm.gradients.round.Round`.
        buckets: Likewise.
        agreement: Likewise.
        launch: Likewise.
        strategy: What to call the strategy.
        in_background: Whether what ``launch`` starts is done by a :class:`RecordedThread`.
    """
    labels = [{"bucket": i, "bytes": bucket.buffer.nbytes} for i, bucket in enumerate(buckets)]
    coming = iter(labels)  # buckets travel in their order

    def launch_recorded(buffer: Any) -> Callable[[], object]:
        label = next(coming)
        described = {**label, "strategy": strategy}
        if not in_background:
            return recorded("communicate", launch, described)(buffer)
        if record.active is not None:
            record.active.label = described
        return recorded("wait", launch(buffer), label)

    wrapped = [_RecordedBucket(bucket, label) for bucket, label in zip(buckets, labels, strict=True)]
    return Round(params, wrapped, agreement, launch_recorded)


class RecordedThread(ThreadPoolExecutor):
    """A thread in which the averaging of each bucket is a span."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have the thread call a function, which averages the bucket that is being launched."""
        label = record.active.label if record.active is not None else None
        return super().submit(recorded("communicate", fn, label), *args, **kwargs)


class _RecordedBucket:
    def __init__(self, bucket: AnyBucket, label: dict[str, Any]) -> None:
        self.members = bucket.members
        self.buffer = bucket.buffer
        self._bucket = bucket
        self._label = label

    def pack(self, params: Sequence[Named], grads: Sequence[Any] | None = None) -> None:
        with span("pack", self._label):
            self._bucket.pack(params, grads)

    def view(self, params: Sequence[Named]) -> None:
        with span("view", self._label):
            self._bucket.view(params)
