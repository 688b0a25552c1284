"""Averaging in the background: a thread of its own, which communicates on a communicator of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mn_comm.config import Config
from mn_comm.gradients.reducer import GradientReducer
from mn_comm.intra import Buffer
from mn_comm.strategies import Strategy
from mn_comm.timeline import is_recording
from mn_comm.topology import Topology

__all__ = ["BackgroundReducer"]


class BackgroundReducer(GradientReducer):
    """A gradient reducer whose buckets are averaged by a thread, while this one goes on computing.

    Args:
        mpi_comm: The communicator whose ranks hold replicas of the model; creating the reducer is collective.
        topology: Where they run.
        strategy: The kind of strategy by which one buffer is averaged.
        config: As for :class:`~mn_comm.gradients.reducer.GradientReducer`.
        bucket_bytes: Likewise.
        sets: Likewise.

    Raises:
        RuntimeError: MPI was initialised without ``MPI_THREAD_MULTIPLE``.
    """

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        topology: Topology,
        strategy: type[Strategy],
        config: Callable[[], Config],
        *,
        bucket_bytes: int | None = None,
        sets: int = 1,
    ) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "expected MPI to be initialised with MPI_THREAD_MULTIPLE, which averaging in the background needs; "
                f"got thread level {MPI.Query_thread()}"
            )
        from concurrent.futures import ThreadPoolExecutor  # not earlier: few need it, and it brings logging

        self._own_comm = mpi_comm.Dup()
        self._own_strategy = strategy(self._own_comm, topology)
        self._stream: Any = None
        kind = ThreadPoolExecutor
        if is_recording():
            from mn_comm.gradients.recorded import RecordedThread as kind
        self._thread = kind(max_workers=1, thread_name_prefix="mn_comm")
        super().__init__(
            mpi_comm,
            self._own_strategy,
            config,
            launch=self._average_later,
            bucket_bytes=bucket_bytes,
            sets=sets,
        )

    def close(self) -> None:
        """End the thread, when what is under way is done, and free its communicator; collective."""
        self._thread.shutdown()
        self._own_strategy.close()
        self._own_comm.Free()

    def _average_later(self, buffer: Any) -> Callable[[], object]:
        if isinstance(buffer, Buffer):
            return self._thread.submit(self._own_strategy.average, buffer).result
        if self._stream is None:
            import cupy

            with buffer.array.device:
                self._stream = cupy.cuda.Stream(non_blocking=True)
        average: Callable[[], object] = buffer.average_in(self._thread, self._stream)
        return average
