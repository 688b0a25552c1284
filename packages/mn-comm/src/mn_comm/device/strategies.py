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
from mn_comm.gradients.parts import Exchanged
from mn_comm.gradients.strategies import Strategy
from mn_comm.ranks import agreement
from mn_comm.ranks.background import Future

if TYPE_CHECKING:
    from mn_comm.device import nccl
    from mn_comm.gradients.compression import CompressionScheme
    from mn_comm.ranks.intracomm import Ranks


def on_device(strategy: Strategy) -> DeviceStrategy:
    """Return a strategy's counterpart for the current devices, or raise on every rank if it lacks NCCL; collective."""
    context, way = strategy.context, _way(strategy)
    if way == "alone" or strategy.size == 1:
        return Alone(strategy)
    if strategy.compressor is not None:
        return _compressed(strategy, strategy.compressor.compression)
    if way == "mpi" and is_cuda_aware(context.ranks):
        return Direct(strategy)
    if way == "nccl":
        return Nccl(strategy, nccl_ranks_of(context.ranks).look_again())
    if way == "nodes":
        within = _nccl_in_groups(strategy, context.within)
        if within is not None:
            return Nccl(strategy, within) if context.topology.inter_size == 1 else NodeNccl(strategy, within)
    return Staged(strategy)


def _way(strategy: Strategy) -> str:
    """Return how a strategy averages on devices: without NCCL if it does so in a thread of the caller."""
    uses_nccl = strategy.on_device in ("nccl", "nodes")
    return "mpi" if uses_nccl and strategy.context.is_apart else strategy.on_device


def _compressed(strategy: Strategy, compression: CompressionScheme) -> DeviceStrategy:
    """Return the counterpart of a strategy that compresses; collective."""
    way, context = _way(strategy), strategy.context
    is_on_one_node = context.topology.inter_size == 1
    if way in ("nccl", "nodes") and not is_on_one_node and context.topology.most_intra_size > 1:
        within = _nccl_in_groups(strategy, context.within)
        if within is None:
            return Staged(strategy)
        across = _nccl_in_groups(strategy, context.across) if way == "nccl" and compression.is_launched else None
        return NodeNccl(strategy, within, across)
    if way == "staged" or not compression.on_devices:
        return Staged(strategy)  # data that is in host memory anyway is compressed there
    # Between all ranks, as if each were a node.
    if compression.is_launched and (way == "nccl" or (way == "nodes" and is_on_one_node)):
        among_all = nccl_ranks_of(context.ranks).look_again()
        if way == "nccl" or among_all.obstacle is None:
            return CompressedNccl(strategy, among_all)
    return Compressed(strategy)


def _nccl_in_groups(strategy: Strategy, ranks: Ranks) -> NcclRanks | None:
    """Return the use of NCCL among these ranks if it can be used in all groups like this one; collective.

    Otherwise, return ``None``, with a warning, or raise an exception on every rank if the strategy needs NCCL.
    """
    found = nccl_ranks_of(ranks).look_again()
    obstacle = next((each for each in strategy.context.ranks.allgather(found.obstacle) if each is not None), None)
    if obstacle is None:
        return found
    if strategy.on_device == "nccl":
        raise obstacle
    agreement.warn(strategy.context.ranks, f"gradients on devices are averaged through host memory: {obstacle}")
    return None


class Alone(DeviceStrategy):
    """Leave the packed bucket as it is."""

    def average(self, bucket: DeviceBucket) -> _OnStream:
        return _OnStream(bucket, lambda: bucket.flat, bucket.packed())


class Staged(DeviceStrategy):
    """Average through pinned host memory, by the strategy for host arrays."""

    def is_staged(self, dtype: np.dtype[Any]) -> bool:
        return True

    def mean(self, bucket: DeviceBucket) -> Any:
        assert bucket.host is not None
        bucket.flat.get(out=bucket.host.flat)
        bucket.host.mean()
        bucket.flat.set(bucket.host.flat)
        return bucket.flat


class Direct(Staged):
    """Pass device memory to a CUDA-aware MPI; half precision, which MPI cannot add up, is staged."""

    def is_staged(self, dtype: np.dtype[Any]) -> bool:
        return is_half(dtype)

    def mean(self, bucket: DeviceBucket) -> Any:
        import cupy

        if bucket.host is not None:
            return super().mean(bucket)
        # MPI is independent of streams: the gradients must be packed.
        cupy.cuda.get_current_stream().synchronize()
        self.host.context.ranks.allreduce_blocking(bucket.flat)
        bucket.flat /= self.host.size
        return bucket.flat


class Nccl(DeviceStrategy):
    """One NCCL all-reduce over some ranks, in the dtype in which the bucket is sent."""

    uses_nccl = True
    what = "all_reduce of gradients"

    def __init__(self, host: Strategy, ranks: NcclRanks) -> None:
        super().__init__(host)
        ranks.require()
        self._ranks = ranks

    def connect(self) -> nccl.NcclCommunicator:
        return self._ranks.connect()

    def average(self, bucket: DeviceBucket) -> _OnStream:
        with bucket.on_side_stream(bucket.packed()):
            self._ranks.raise_failure()
            mean = self.mean(bucket)
            done = self._ranks.launched(bucket.nccl, self.what)
        return _OnStream(bucket, lambda: mean, done)

    def mean(self, bucket: DeviceBucket) -> Any:
        """Overwrite a packed bucket with its mean; collective. Only put operations on the current stream."""
        bucket.nccl.all_reduce(bucket.flat, mean=True)
        return bucket.flat


class CompressedNccl(Nccl):
    """Compression on the device between all ranks, as if each were a node, by NCCL."""

    compresses = True
    what = "exchange of compressed gradients"

    def mean(self, bucket: DeviceBucket) -> Any:
        return _compress(self.host, NcclTransport(self.host.context.ranks, bucket.nccl), bucket.flat, bucket.exchanged)


class Compressed(DeviceStrategy):
    """Compression on the device between all ranks, as if each were a node, by MPI and pinned memory."""

    compresses = True

    def mean(self, bucket: DeviceBucket) -> Any:
        return _compress(self.host, StagedTransport(self.host.context.ranks), bucket.flat, bucket.exchanged)


class NodeNccl(DeviceStrategy):
    """NCCL within each node; across nodes each share is staged for the MPI allreduce, or compressed on the device.

    ``across`` has the ranks with the same ``intra_rank`` on all nodes, if codes of shares are sent by NCCL.
    """

    uses_nccl = True

    def __init__(self, host: Strategy, within: NcclRanks, across: NcclRanks | None = None) -> None:
        super().__init__(host)
        topology = host.context.topology
        self._context = host.context
        self._rank = topology.intra_rank
        self._within = within
        self._across = across
        # For each communicator within the node, the one across nodes.
        self._nccl_across: dict[nccl.NcclCommunicator, nccl.NcclCommunicator] = {}
        self.compresses = host.compressor is not None and host.compressor.compression.on_devices
        self.shares = host.n_leaders
        self._are_all_leaders = self.shares == topology.intra_size
        # The divisor for the mean over this node, because nodes may have different numbers of ranks.
        self._weight = topology.size / topology.inter_size / topology.intra_size

    def average(self, bucket: DeviceBucket) -> _OnStream:
        import cupy

        is_leader = self._rank < self.shares
        with bucket.on_side_stream(bucket.packed()):
            self._within.raise_failure()
            self._reduce_scatter(bucket)
            done = self._within.launched(bucket.nccl, "reduce_scatter of gradients")
            if self._across is not None:  # all remaining operations, too, are put on this stream
                if is_leader:
                    self._exchange_by_nccl(bucket, self._across)
                mean = self._all_gather(bucket)
                return _OnStream(bucket, lambda: mean, cupy.cuda.get_current_stream().record())
        host_part = bucket.submit(lambda: bucket.finish(self._average_across, bucket)) if is_leader else None
        return _OnStream(bucket, lambda: self._all_gather(bucket), done, host_part)

    def connect(self) -> nccl.NcclCommunicator:
        across = None if self._across is None else self._across.connect()
        within = self._within.connect()
        if across is not None:
            self._nccl_across[within] = across
        return within

    def _exchange_by_nccl(self, bucket: DeviceBucket, across: NcclRanks) -> None:
        communicator = self._nccl_across[bucket.nccl]
        across.raise_failure()
        self._compress_share(NcclTransport(self._context.across, communicator), bucket)
        across.launched(communicator, "exchange of compressed gradients")

    def _average_across(self, bucket: DeviceBucket) -> None:
        """Overwrite this rank's share with its mean over nodes."""
        if self.compresses:
            self._compress_share(StagedTransport(self._context.across), bucket)
            return
        share = self._shares(bucket)[self._rank]
        if bucket.pinned is None:
            bucket.pinned = staging.empty_pinned(share.shape, share.dtype)
        share.get(out=bucket.pinned)
        divide(bucket.pinned, self._weight, bucket.pinned)
        self.host.mean_across(self._context.across, bucket.pinned, self._exchanged(bucket, share))
        share.set(bucket.pinned)

    def _compress_share(self, transport: Transport, bucket: DeviceBucket) -> None:
        """Overwrite this rank's share with its mean over nodes, on the current stream."""
        bucket.whole[bucket.flat.size :] = 0  # the padding of the last share must not be kept
        share = self._shares(bucket)[self._rank]
        if self._weight != 1:
            share /= self._weight
        _compress(self.host, transport, share, self._exchanged(bucket, share))

    def _exchanged(self, bucket: DeviceBucket, share: Any) -> Exchanged:
        return bucket.exchanged._replace(begin=self._rank * share.size)

    def _reduce_scatter(self, bucket: DeviceBucket) -> None:
        if self._are_all_leaders:
            bucket.nccl.reduce_scatter(bucket.whole, mean=True)
            return
        for owner, share in enumerate(self._shares(bucket)):
            bucket.nccl.reduce(share, owner, mean=True)

    def _all_gather(self, bucket: DeviceBucket) -> Any:
        if self._are_all_leaders:
            bucket.nccl.all_gather(bucket.whole)
        else:
            for owner, share in enumerate(self._shares(bucket)):
                bucket.nccl.broadcast(share, owner)
        self._within.launched(bucket.nccl, "all_gather of gradients")
        return bucket.flat

    def _shares(self, bucket: DeviceBucket) -> Any:
        """Return the shares of a bucket, one in each row."""
        return bucket.whole.reshape(self.shares, -1)


def _compress(host: Strategy, transport: Transport, array: Any, what: Exchanged) -> Any:
    """Overwrite an array with its compressed mean, and return it."""
    assert host.compressor is not None
    host.compressor.average(transport, array, what)
    return array


class _OnStream:
    """A mean that is computed on a bucket's side stream.

    In the program's thread, ``finish`` does the remaining work, on that stream, and returns the mean: after the event
    ``done``, and after ``host_part``, the worker's part, if any.
    """

    def __init__(
        self, bucket: DeviceBucket, finish: Callable[[], Any], done: Any, host_part: Future[Any] | None = None
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
        with self._bucket.on_side_stream(self._done) as stream:
            mean = self._finish()
            done = stream.record()
        with self._bucket.flat.device:  # each device has its own current stream
            cupy.cuda.get_current_stream().wait_event(done)
        return mean

    def then(self, function: Callable[[Any], Any]) -> _OnStream:
        """Return a future of a function of the mean, computed on the side stream."""
        return _OnStream(self._bucket, lambda: function(self._finish()), self._done, self._host_part)
