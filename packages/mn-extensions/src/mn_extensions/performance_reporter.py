"""An extension that logs how fast all ranks train together, and what they wait for."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import chainer
from chainer.training import PRIORITY_WRITER, Extension, get_trigger

from mn_comm import CommunicatorBase, transact
from mn_comm.building_blocks import activity


class _Record(NamedTuple):
    """What one rank has done since the last report.

    Attributes:
        steps: The number of iterations.
        samples: How many samples it has trained on.
        seconds: The time that has passed.
        waited: How much of it the main thread has spent in communication.
        nbytes: How many bytes it has contributed to averages.
    """

    steps: int
    samples: float
    seconds: float
    waited: float
    nbytes: float


class PerformanceReporter(Extension):  # type: ignore[misc]  # Chainer has no types
    """Reports how fast all ranks train together, for ``LogReport``, ``PrintReport`` and ``PlotReport``.

    Since the last report, including evaluations and everything else that the trainer does:

    - ``performance/samples_per_second``: the samples of all ranks, by the batch size of their iterators, per second;
    - ``performance/communication``: the share of the time that the main threads of all ranks have spent in MPI, or
      waiting for a background thread that communicates. Communication that is hidden behind computation does not count;
    - ``performance/bytes``: the bytes of gradients or parameters that all ranks have contributed to averages in an
      iteration; with compression, the bytes that they have sent;
    - ``performance/slowest_rank``: the rank that has spent the most time outside of communication;
    - ``performance/lag``: how many seconds longer than the mean of the other ranks it has taken for an iteration.

    The ranks exchange these numbers when ``report_trigger`` fires, which must happen at the same time on all ranks, and
    on no other occasion. There is no additional thread. If a rank raises an exception, nothing is reported.

    Args:
        comm: The ranks.
        report_trigger: When to report: as ``LogReport`` does, but not by the same object, as Chainer's triggers fire
            only for the first extension that asks. Between two reports, nothing is communicated.
        optimizer: The name of the multi-node optimizer in the updater, or the optimizer itself.

    Example:
        >>> trainer.extend(chainermn.extensions.PerformanceReporter(comm))
    """

    trigger = 1, "iteration"
    priority = PRIORITY_WRITER
    name = "PerformanceReporter"

    def __init__(self, comm: CommunicatorBase, report_trigger: Any = (1, "epoch"), optimizer: Any = "main") -> None:
        self.comm = comm
        self.report_trigger = get_trigger(report_trigger)
        self._optimizer = optimizer
        self._begin()

    def initialize(self, trainer: Any) -> None:
        """Start the clock."""
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._meetings = 0
        self._sent = 0
        self._began = time.perf_counter()
        self._waited = activity().waited

    def __call__(self, trainer: Any) -> None:
        """Count an iteration; when ``report_trigger`` fires, report. Collective then."""
        updater = trainer.updater
        optimizer = self._optimizer if not isinstance(self._optimizer, str) else updater.get_optimizer(self._optimizer)
        self._steps += 1
        if getattr(optimizer, "is_meeting", True):
            self._meetings += 1
            if getattr(optimizer, "may_diverge", False):
                self._sent += _compressed(optimizer) or 0  # in other steps, such an optimizer sends nothing
        if not self.report_trigger(trainer):
            return
        record = self._record(updater, optimizer)
        records = transact(self.comm, lambda: self.comm.allgather_obj(record))
        chainer.report({f"performance/{name}": value for name, value in _summarize(records).items()})
        self._begin()

    def _record(self, updater: Any, optimizer: Any) -> _Record:
        seconds = time.perf_counter() - self._began
        waited = (activity().waited - self._waited) / 1e9
        iterator = updater.get_iterator("main")
        batch_size = getattr(iterator, "batch_size", 0)
        if getattr(iterator, "global_batch", False):
            batch_size /= self.comm.size
        return _Record(self._steps, self._steps * batch_size, seconds, waited, self._nbytes(optimizer))

    def _nbytes(self, optimizer: Any) -> float:
        if self.comm.size == 1:
            return 0
        compressed = _compressed(optimizer)
        if compressed is None:
            params = (param.array for param in optimizer.target.params())
            of_model = sum(_nbytes(array, self.comm) for array in params if array is not None)
            return of_model * self._meetings * float(getattr(optimizer, "share_of_meeting", 1.0))
        # Without local steps, all steps send as much as the latest. Asking each of them would take time.
        return self._sent if optimizer.may_diverge else compressed * self._meetings


def _compressed(optimizer: Any) -> int | None:
    report = getattr(optimizer, "compression_report", None)
    return None if report is None else report.bytes_sent


def _nbytes(array: Any, comm: CommunicatorBase) -> int:
    dtype = getattr(comm, "allreduce_grad_dtype", None)
    return int(array.size * (array.dtype if dtype is None else dtype).itemsize)


def _summarize(records: list[_Record]) -> dict[str, float]:
    """Return the observations."""
    own = [(record.seconds - record.waited) / record.steps for record in records]
    slowest = max(range(len(own)), key=own.__getitem__)
    others = [seconds for rank, seconds in enumerate(own) if rank != slowest]
    return {
        "samples_per_second": sum(record.samples / record.seconds for record in records),
        "communication": sum(record.waited for record in records) / sum(record.seconds for record in records),
        "bytes": sum(record.nbytes / record.steps for record in records),
        "slowest_rank": slowest,
        "lag": own[slowest] - sum(others) / len(others) if others else 0.0,
    }
