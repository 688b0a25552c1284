"""How the mean of a bucket on a device is computed: staged through host memory, by NCCL, or by both.

Each strategy of :mod:`mn_comm.strategies` names its counterpart here as ``on_device``.

NCCL is always called by the main thread, on a separate stream if the program continues in the meantime. So operations
of two communicators are never launched in different orders on different ranks. Only work in host memory is done by the
worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mn_comm.arithmetic import divide, is_half
from mn_comm.device import staging
from mn_comm.device.awareness import is_cuda_aware
from mn_comm.device.nccl_ranks import NcclRanks, nccl_ranks_of
from mn_comm.gradients.bucket import bounds
from mn_comm.worker import Future

if TYPE_CHECKING:
    from mn_comm import nccl
    from mn_comm.device.bucket import DeviceBucket
    from mn_comm.strategies import Strategy

__all__ = ["Alone", "DeviceStrategy", "Direct", "Nccl", "NodeNccl", "Staged", "on_device"]


class DeviceStrategy(Protocol):
    """A way to average buckets on devices.

    Attributes:
        shares: Of how many equal shares a bucket's memory must consist.
        uses_nccl: Whether NCCL is called, so that all ranks must have agreed on what they have before.
    """

    shares: int
    uses_nccl: bool

    def is_staged(self, dtype: np.dtype[Any]) -> bool:
        """Return whether a bucket of this dtype needs memory of the host's strategy as well."""
        ...

    def connect(self) -> nccl.NcclCommunicator | None:
        """Return NCCL's communicator for the current devices of all ranks, if it is used; collective."""
        ...

    def average(self, bucket: DeviceBucket) -> Any:
        """Start to average a packed bucket; collective.

        Returns:
            A future of the mean, an array like ``bucket.flat``.
        """
        ...


def on_device(strategy: Strategy) -> DeviceStrategy:
    """Return the counterpart of a strategy, once the ranks have chosen their devices; collective.

    Raises:
        RuntimeError: It needs NCCL, and that or CuPy is missing on some rank (on every rank).
        ValueError: It needs a device for each rank, and two share one (on every rank).
    """
    context, way = strategy.context, _way(strategy)
    if way == "alone" or strategy.size == 1:
        return Alone()
    if way == "mpi" and is_cuda_aware(context.ranks):
        return Direct(strategy)
    if way == "nccl":
        return Nccl(nccl_ranks_of(context.ranks).look_again())
    if way == "nodes":
        within = nccl_ranks_of(context.within).look_again()
        reasons = [reason for reason in context.ranks.allgather(within.obstacle and str(within.obstacle)) if reason]
        if not reasons and context.topology.inter_size == 1:
            return Nccl(within)
        if not reasons:
            return NodeNccl(strategy, within)
        if context.ranks.rank == 0:
            warnings.warn(f"gradients on devices are averaged through host memory: {reasons[0]}", stacklevel=2)
    return Staged(strategy)


def _way(strategy: Strategy) -> str:
    """Return how gradients on devices are averaged, as the traits name it."""
    way = strategy.traits.on_device
    has_slow_stage = way == "nodes" and strategy.context.topology.inter_size > 1
    if strategy.compressor is None or has_slow_stage or way == "alone":
        return way
    return "staged"  # all of it is exchanged between ranks, and compressed in host memory


class Alone:
    """Leave the packed bucket as it is."""

    shares, uses_nccl = 1, False

    def is_staged(self, dtype: np.dtype[Any]) -> bool:
        """Return False."""
        return False

    def connect(self) -> None:
        """Do without."""

    def average(self, bucket: DeviceBucket) -> Future[Any]:
        """Do nothing."""
        return Future(lambda: bucket.flat)


class Staged:
    """Average through pinned host memory, by the strategy for host arrays.

    Args:
        host: That strategy.
    """

    shares, uses_nccl = 1, False

    def __init__(self, host: Strategy) -> None:
        self._host = host

    def is_staged(self, dtype: np.dtype[Any]) -> bool:
        """Return True."""
        return True

    def connect(self) -> None:
        """Do without."""

    def average(self, bucket: DeviceBucket) -> Future[Any]:
        """Start to average a packed bucket; collective."""
        on_side = bucket.on_side_stream()

        def average() -> Any:
            assert bucket.host is not None
            with on_side() as stream:
                bucket.flat.get(out=bucket.host.flat)
                self._host.average(bucket.host, self._host.size)
                bucket.flat.set(bucket.host.flat)
                # The pinned memory is used again, maybe by other ranks, as soon as this is over.
                stream.synchronize()
            return bucket.flat

        return bucket.submit(average)


class Direct(Staged):
    """Hand the device's memory to a CUDA-aware MPI; half precision, which MPI cannot add up, is staged.

    Args:
        host: The strategy for host arrays.
    """

    def is_staged(self, dtype: np.dtype[Any]) -> bool:
        """Return whether the dtype is one of half precision."""
        return is_half(dtype)

    def average(self, bucket: DeviceBucket) -> Future[Any]:
        """Start to average a packed bucket; collective."""
        if bucket.host is not None:
            return super().average(bucket)
        on_side = bucket.on_side_stream()

        def average() -> Any:
            with on_side() as stream:
                stream.synchronize()  # MPI is independent of streams: the gradients must be packed
                self._host.context.ranks.allreduce_blocking(bucket.flat)
                bucket.flat /= self._host.size
            return bucket.flat

        return bucket.submit(average)


class Nccl:
    """One NCCL all-reduce over some ranks, in the dtype in which the bucket travels.

    Args:
        ranks: The ranks.
    """

    shares, uses_nccl = 1, True

    def __init__(self, ranks: NcclRanks) -> None:
        ranks.require()
        self._ranks = ranks

    def is_staged(self, dtype: np.dtype[Any]) -> bool:
        """Return False."""
        return False

    def connect(self) -> nccl.NcclCommunicator:
        """Return the communicator of all devices."""
        return self._ranks.connect()

    def average(self, bucket: DeviceBucket) -> _OnStream:
        """Start to average a packed bucket; collective."""
        with bucket.on_side_stream()():
            self._ranks.raise_failure()
            bucket.nccl.all_reduce(bucket.flat, mean=True)
            done = self._ranks.launched(bucket.nccl, "all_reduce of gradients")
        return _OnStream(bucket, lambda: bucket.flat, done)


class NodeNccl:
    """NCCL within each node; each share is staged for the MPI allreduce across nodes.

    Args:
        host: The strategy for host arrays.
        within: The ranks of this node.
    """

    uses_nccl = True

    def __init__(self, host: Strategy, within: NcclRanks) -> None:
        within.require()
        self._host = host
        self._context = host.context
        self._within = within
        self.shares = host.traits.talkers or host.context.topology.least_intra_size

    def is_staged(self, dtype: np.dtype[Any]) -> bool:
        """Return False: only a share of a bucket is, in memory of its own."""
        return False

    def average(self, bucket: DeviceBucket) -> _OnStream:
        """Start to average a packed bucket; collective."""
        topology, on_side = self._context.topology, bucket.on_side_stream()
        with on_side():
            self._within.raise_failure()
            self._reduce_scatter(bucket)
            done = self._within.launched(bucket.nccl, "reduce_scatter of gradients")
        if topology.intra_rank >= self.shares:
            return _OnStream(bucket, lambda: self._all_gather(bucket), done)
        share = self._share(bucket.whole, topology.intra_rank)
        what = bucket.exchanged._replace(begin=bounds(bucket.whole.size, self.shares)[topology.intra_rank])
        if bucket.pinned is None:
            bucket.pinned = staging.empty_pinned(share.shape, share.dtype)

        def average_across() -> None:
            with on_side() as stream:
                pinned = bucket.pinned
                share.get(out=pinned)
                # It is the mean over this node, which may have more ranks than another one.
                divide(pinned, topology.size / topology.inter_size / topology.intra_size, pinned)
                self._host.mean_across(self._context.across, pinned, what)
                share.set(pinned)
                stream.synchronize()

        return _OnStream(bucket, lambda: self._all_gather(bucket), done, bucket.submit(average_across))

    def connect(self) -> nccl.NcclCommunicator:
        """Return the communicator of this node's devices."""
        return self._within.connect()

    def _reduce_scatter(self, bucket: DeviceBucket) -> None:
        if self.shares == self._context.topology.intra_size:
            bucket.nccl.reduce_scatter(bucket.whole, mean=True)
            return
        for owner in range(self.shares):
            bucket.nccl.reduce(self._share(bucket.whole, owner), owner, mean=True)

    def _all_gather(self, bucket: DeviceBucket) -> Any:
        if self.shares == self._context.topology.intra_size:
            bucket.nccl.all_gather(bucket.whole)
        else:
            for owner in range(self.shares):
                bucket.nccl.broadcast(self._share(bucket.whole, owner), owner)
        self._within.launched(bucket.nccl, "all_gather of gradients")
        return bucket.flat

    def _share(self, whole: Any, owner: int) -> Any:
        begin, end = bounds(whole.size, self.shares)[owner : owner + 2]
        return whole[begin:end]


class _OnStream:
    """A mean that is computed on a bucket's side stream.

    Args:
        bucket: The bucket.
        finish: What is left to be done by the thread of the program, on that stream; returns the mean.
        done: The event behind what was launched already.
        host_part: What the worker does in between, if anything.
    """

    def __init__(
        self, bucket: DeviceBucket, finish: Callable[[], Any], done: Any, host_part: Future[None] | None = None
    ) -> None:
        self._bucket = bucket
        self._finish = finish
        self._done = done
        self._host_part = host_part

    def wait(self) -> Any:
        """Let the current stream wait for the mean, and return it."""
        import cupy

        if self._host_part is not None:
            self._host_part.wait()
        with self._bucket.on_side_stream(after_current=False)() as stream:
            stream.wait_event(self._done)
            mean = self._finish()
            done = stream.record()
        cupy.cuda.get_current_stream().wait_event(done)
        return mean

    def then(self, function: Callable[[Any], Any]) -> _OnStream:
        """Return what a function makes of the mean, on the side stream."""
        return _OnStream(self._bucket, lambda: function(self._finish()), self._done, self._host_part)
