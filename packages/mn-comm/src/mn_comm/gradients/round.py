"""Step 4, once: the averaging of all gradients of one backward pass, bucket after bucket as they become ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mn_comm.gradients.agree import Agreement
from mn_comm.gradients.bucket import AnyBucket
from mn_comm.gradients.select import Named

__all__ = ["Launch", "Round"]

Launch = Callable[[Any], Callable[[], object]]
"""Starts the averaging of a buffer, and returns what waits for its end."""


class Round:
    """The averaging of the gradients of one backward pass.

    Every parameter is marked once, when its gradient will not change any more. Buckets travel in one fixed order on all
    ranks, each as soon as all its gradients, and all buckets before it, are ready.

    Args:
        params: Names and parameters that take part.
        buckets: Their buckets.
        agreement: The check under way that all ranks have the same parameters; finished before the first bucket
            travels.
        launch: How a bucket is sent on its way.

    Attributes:
        grads: The gradients of all parameters, if they are known to be final and were asked for.
    """

    grads: Sequence[Any] | None = None

    def __init__(
        self, params: Sequence[Named], buckets: Sequence[AnyBucket], agreement: Agreement, launch: Launch
    ) -> None:
        self._params = params
        self._buckets = buckets
        self._agreement = agreement
        self._launch = launch
        self._bucket_of: dict[str, int] = {}
        self._missing = [len(bucket.members) for bucket in buckets]
        self._waits: list[Callable[[], object]] = []

    def ready(self, name: str) -> None:
        """Mark the gradient of the parameter of that name as final."""
        if not self._bucket_of:  # not earlier: many rounds are marked as a whole
            self._bucket_of = {
                self._params[member][0]: i for i, bucket in enumerate(self._buckets) for member in bucket.members
            }
        self._missing[self._bucket_of[name]] -= 1
        self._launch_complete()

    def ready_all(self) -> None:
        """Mark all gradients as final, those that were marked already and those that are missing as well."""
        self._missing = [0] * len(self._buckets)
        self._launch_complete()

    def wait(self) -> None:
        """Wait until all buckets are averaged; then the gradients are views of them.

        Raises:
            ValueError: The ranks have different parameters (on every rank).
        """
        self._agreement.finish()  # where there is no bucket at all
        for wait in self._waits:
            wait()
        for bucket in self._buckets:
            bucket.view(self._params)

    def _launch_complete(self) -> None:
        while len(self._waits) < len(self._buckets) and not self._missing[len(self._waits)]:
            bucket = self._buckets[len(self._waits)]
            bucket.pack(self._params, self.grads)
            # Only now: packing touches nothing but this rank's memory, and hides the time that agreeing takes.
            self._agreement.finish()
            self._waits.append(self._launch(bucket.buffer))
