"""How the mean of a bucket on a device is computed: staged through host memory, by NCCL, by both, or compressed.

Each strategy of :mod:`mn_comm.gradients.strategies` says by ``on_device`` which of these is its counterpart.

NCCL is always called by the main thread, on a separate stream if the program continues in the meantime. So operations
of two communicators are never launched in different orders on different ranks, which would then wait for each other.
Only work in host memory is done by the worker, and a thread of the caller averages through host memory. The same
applies to compressed gradients: they are sent by NCCL where exact gradients would be, unless the host would have to
wait for the device to learn their length.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis.arithmetic import divide, is_half
from mn_comm.collectives.transport import Transport
from mn_comm.device import staging
from mn_comm.device.awareness import is_cuda_aware
from mn_comm.device.bucket import DeviceBucket, DeviceStrategy
from mn_comm.device.nccl_ranks import NcclRanks, nccl_ranks_of
from mn_comm.device.transports import NcclTransport, StagedTransport
from mn_comm.gradients.parts import Exchanged, bounds
from mn_comm.gradients.strategies import Strategy
from mn_comm.ranks.background import Future

if TYPE_CHECKING:
    from mn_comm.device import nccl
    from mn_comm.gradients.compression import Compressor

__all__ = ["Alone", "Compressed", "Direct", "Nccl", "NodeNccl", "Staged", "on_device"]


def on_device(strategy: Strategy) -> DeviceStrategy:
    """Return the counterpart of a strategy, once the ranks have chosen their devices; collective.

    Raises:
        RuntimeError: It needs NCCL, and NCCL or CuPy is missing on some rank (on every rank).
        ValueError: It needs a device for each rank, and two ranks share one (on every rank).
    """
    context, way = strategy.context, _way(strategy)
    if way == "alone" or strategy.size == 1:
        return Alone(strategy)
    if strategy.compressor is not None:
        return _compressed(strategy, strategy.compressor)
    if way == "mpi" and is_cuda_aware(context.ranks):
        return Direct(strategy)
    if way == "nccl":
        return Nccl(strategy, nccl_ranks_of(context.ranks).look_again())
    if way == "nodes":
        within = nccl_ranks_of(context.within).look_again()
        obstacle = _obstacle(strategy, within)
        if obstacle is None:
            return Nccl(strategy, within) if context.topology.inter_size == 1 else NodeNccl(strategy, within)
        _warn(strategy, obstacle)
    return Staged(strategy)


def _way(strategy: Strategy) -> str:
    """Return how a strategy averages on devices: without NCCL if it does so in a thread of the caller."""
    uses_nccl = strategy.on_device in ("nccl", "nodes")
    return "mpi" if uses_nccl and strategy.context.is_apart else strategy.on_device


def _compressed(strategy: Strategy, compressor: Compressor) -> DeviceStrategy:
    """Return the counterpart of a strategy that compresses; collective."""
    way, topology = _way(strategy), strategy.context.topology
    if way == "staged":
        return Staged(strategy)  # data that is in host memory anyway is compressed there
    if way == "mpi" or topology.inter_size == 1 or topology.most_intra_size == 1:
        return _between_all(strategy, compressor)
    within = nccl_ranks_of(strategy.context.within).look_again()
    obstacle = _obstacle(strategy, within)
    if obstacle is not None:
        if way == "nccl":
            raise obstacle
        _warn(strategy, obstacle)
        return Staged(strategy)
    across = None
    if way == "nccl" and compressor.compression.is_launched:
        across = nccl_ranks_of(strategy.context.across).look_again()
        obstacle = _obstacle(strategy, across)
        if obstacle is not None:
            raise obstacle
    return NodeNccl(strategy, within, across)


def _between_all(strategy: Strategy, compressor: Compressor) -> DeviceStrategy:
    """Return a strategy that compresses between all ranks, as if each were a node; collective."""
    if not compressor.compression.on_devices:
        return Staged(strategy)
    way = _way(strategy)
    nccl_ranks = None
    if compressor.compression.is_launched and (
        way == "nccl" or (way == "nodes" and strategy.context.topology.inter_size == 1)
    ):
        nccl_ranks = nccl_ranks_of(strategy.context.ranks).look_again()
        if way == "nccl":
            nccl_ranks.require()
        elif nccl_ranks.obstacle is not None:
            nccl_ranks = None
    return Compressed(strategy, compressor, nccl_ranks)


def _obstacle(strategy: Strategy, ranks: NcclRanks) -> Exception | None:
    """Return why NCCL cannot be used among these or other groups of ranks, the same on all ranks; collective."""
    return next((each for each in strategy.context.ranks.allgather(ranks.obstacle) if each is not None), None)


def _warn(strategy: Strategy, obstacle: Exception) -> None:
    if strategy.context.ranks.rank == 0:
        warnings.warn(f"gradients on devices are averaged through host memory: {obstacle}", stacklevel=2)


class Alone(DeviceStrategy):
    """Leave the packed bucket as it is."""

    def average(self, bucket: DeviceBucket) -> Future[Any]:
        """Do nothing."""
        return Future(lambda: bucket.flat)


class Staged(DeviceStrategy):
    """Average through pinned host memory, by the strategy for host arrays."""

    def is_staged(self, dtype: np.dtype[Any]) -> bool:
        """Return True."""
        return True

    def average(self, bucket: DeviceBucket) -> Future[Any]:
        """Start to average a packed bucket; collective."""

        def average() -> Any:
            assert bucket.host is not None
            bucket.flat.get(out=bucket.host.flat)
            bucket.host.mean()
            bucket.flat.set(bucket.host.flat)
            return bucket.flat

        return bucket.submit_on_side_stream(average)


class Direct(Staged):
    """Pass device memory to a CUDA-aware MPI; half precision, which MPI cannot add up, is staged."""

    def is_staged(self, dtype: np.dtype[Any]) -> bool:
        """Return whether the dtype has half precision."""
        return is_half(dtype)

    def average(self, bucket: DeviceBucket) -> Future[Any]:
        """Start to average a packed bucket; collective."""
        import cupy

        if bucket.host is not None:
            return super().average(bucket)

        def average() -> Any:
            # MPI is independent of streams: the gradients must be packed.
            cupy.cuda.get_current_stream().synchronize()
            self.host.context.ranks.allreduce_blocking(bucket.flat)
            bucket.flat /= self.host.size
            return bucket.flat

        return bucket.submit_on_side_stream(average)


class Nccl(DeviceStrategy):
    """One NCCL all-reduce over some ranks, in the dtype in which the bucket is sent."""

    uses_nccl = True

    def __init__(self, host: Strategy, ranks: NcclRanks) -> None:
        super().__init__(host)
        ranks.require()
        self._ranks = ranks

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


class Compressed(DeviceStrategy):
    """Compression on the device between all ranks, as if each were a node: by NCCL, or by MPI and pinned memory."""

    compresses = True

    def __init__(self, host: Strategy, compressor: Compressor, nccl_ranks: NcclRanks | None) -> None:
        super().__init__(host)
        self._ranks = host.context.ranks
        self._compressor = compressor
        self._nccl_ranks = nccl_ranks
        self.uses_nccl = nccl_ranks is not None

    def connect(self) -> nccl.NcclCommunicator | None:
        """Return the communicator of all devices, if NCCL is used."""
        return None if self._nccl_ranks is None else self._nccl_ranks.connect()

    def average(self, bucket: DeviceBucket) -> Any:
        """Start to average a packed bucket; collective."""
        if self._nccl_ranks is not None:
            with bucket.on_side_stream()():
                self._nccl_ranks.raise_failure()
                self._compressor.average(NcclTransport(self._ranks, bucket.nccl), bucket.flat, bucket.exchanged)
                done = self._nccl_ranks.launched(bucket.nccl, "exchange of compressed gradients")
            return _OnStream(bucket, lambda: bucket.flat, done)

        def average() -> Any:
            self._compressor.average(StagedTransport(self._ranks), bucket.flat, bucket.exchanged)
            return bucket.flat

        return bucket.submit_on_side_stream(average)


class NodeNccl(DeviceStrategy):
    """NCCL within each node; across nodes each share is staged for the MPI allreduce, or compressed on the device.

    Args:
        host: The strategy for host arrays.
        within: The ranks of this node.
        across: The ranks with the same ``intra_rank`` on all nodes, if codes of shares are sent by NCCL.
    """

    uses_nccl = True

    def __init__(self, host: Strategy, within: NcclRanks, across: NcclRanks | None = None) -> None:
        super().__init__(host)
        within.require()
        self._context = host.context
        self._within = within
        self._across = across
        self._nccl_across: nccl.NcclCommunicator | None = None
        compressor = host.compressor
        self._compressor = compressor if compressor is not None and compressor.compression.on_devices else None
        self.compresses = self._compressor is not None
        self.shares = host.n_leaders

    def average(self, bucket: DeviceBucket) -> _OnStream:
        """Start to average a packed bucket; collective."""
        topology, on_side = self._context.topology, bucket.on_side_stream()
        with on_side():
            self._within.raise_failure()
            self._reduce_scatter(bucket)
            done = self._within.launched(bucket.nccl, "reduce_scatter of gradients")
            if self._across is not None:
                return self._finish_by_nccl(bucket)
        if topology.intra_rank >= self.shares:
            return _OnStream(bucket, lambda: self._all_gather(bucket), done)
        share = self._share(bucket.whole, topology.intra_rank)
        if bucket.pinned is None and not self.compresses:
            bucket.pinned = staging.empty_pinned(share.shape, share.dtype)

        def average_across() -> None:
            with on_side() as stream:
                if self.compresses:
                    self._compress(StagedTransport(self._context.across), bucket)
                else:
                    pinned = bucket.pinned
                    share.get(out=pinned)
                    divide(pinned, self._weight, pinned)
                    self.host.mean_across(self._context.across, pinned, self._exchanged(bucket))
                    share.set(pinned)
                stream.synchronize()

        return _OnStream(bucket, lambda: self._all_gather(bucket), done, bucket.submit(average_across))

    def connect(self) -> nccl.NcclCommunicator:
        """Return the communicator of this node's devices."""
        if self._across is not None:
            self._nccl_across = self._across.connect()
        return self._within.connect()

    def _finish_by_nccl(self, bucket: DeviceBucket) -> _OnStream:
        """Put all remaining operations on the current stream."""
        import cupy

        assert self._across is not None
        if self._context.topology.intra_rank < self.shares:
            assert self._nccl_across is not None
            self._across.raise_failure()
            self._compress(NcclTransport(self._context.across, self._nccl_across), bucket)
            self._across.launched(self._nccl_across, "exchange of compressed gradients")
        mean = self._all_gather(bucket)
        return _OnStream(bucket, lambda: mean, cupy.cuda.get_current_stream().record())

    @property
    def _weight(self) -> float:
        """The divisor for the mean over this node, because nodes may have different numbers of ranks."""
        topology = self._context.topology
        return topology.size / topology.inter_size / topology.intra_size

    def _exchanged(self, bucket: DeviceBucket) -> Exchanged:
        begin = bounds(bucket.whole.size, self.shares)[self._context.topology.intra_rank]
        return bucket.exchanged._replace(begin=begin)

    def _compress(self, transport: Transport, bucket: DeviceBucket) -> None:
        """Overwrite this rank's share with its mean over nodes, on the current stream."""
        assert self._compressor is not None
        bucket.whole[bucket.flat.size :] = 0  # the padding of the last share must not be kept
        share = self._share(bucket.whole, self._context.topology.intra_rank)
        if self._weight != 1:
            share /= self._weight
        if share.size:
            self._compressor.average(transport, share, self._exchanged(bucket))

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
        finish: The remaining work for the program's thread, on that stream; returns the mean.
        done: The event after the operations that were launched already.
        host_part: The worker's part in between, if any.
    """

    def __init__(
        self, bucket: DeviceBucket, finish: Callable[[], Any], done: Any, host_part: Future[None] | None = None
    ) -> None:
        self._bucket = bucket
        # Once, although this future and one that `then` has returned may both be waited for: it may call NCCL.
        self._finish = functools.cache(finish)
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
        with self._bucket.flat.device:  # each device has its own current stream
            cupy.cuda.get_current_stream().wait_event(done)
        return mean

    def then(self, function: Callable[[Any], Any]) -> _OnStream:
        """Return a future of a function of the mean, computed on the side stream."""
        return _OnStream(self._bucket, lambda: function(self._finish()), self._done, self._host_part)
