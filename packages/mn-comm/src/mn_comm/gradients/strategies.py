"""Step 4: how the mean of a bucket over all ranks is computed. The name of a communicator chooses the strategy.

================  =====================================  ==============================================
name              within a node                          across nodes
================  =====================================  ==============================================
naive             none                                      MPI allreduce among all ranks, gradient by gradient
flat              none                                      MPI allreduce among all ranks, packed
hierarchical      shared memory: every rank adds a part  MPI allreduce among the nodes' first ranks
two_dimensional   shared memory: every rank adds a part  MPI allreduce of each part among its owners
single_node       shared memory: every rank adds a part  none: several nodes are refused
non_cuda_aware    as two_dimensional; never NCCL         as two_dimensional
pure_nccl         NCCL among all ranks; device arrays only
dummy             none at all, to measure what packing costs
================  =====================================  ==============================================

For arrays on devices see :mod:`mn_comm.device.strategies`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mn_comm.basis.arithmetic import add_up, divide
from mn_comm.basis.device_backend import device_backend
from mn_comm.collectives.allreduce import mean_in_place
from mn_comm.collectives.mean import mean_to_each
from mn_comm.collectives.transport import Transport
from mn_comm.gradients.bucket import Block, Bucket
from mn_comm.gradients.parts import Exchanged
from mn_comm.ranks import agreement
from mn_comm.ranks.shared_memory import share

if TYPE_CHECKING:
    from mn_comm.gradients.compression import Compressor
    from mn_comm.ranks.context import Context
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["TRAITS", "Strategy", "Traits"]

_Array = np.ndarray[Any, Any]


class Traits(NamedTuple):
    """The properties by which strategies differ.

    Attributes:
        talkers: How many ranks of a node communicate with other nodes, each about its share: 1, or ``None`` for all; 0
            if nodes are ignored.
        one_node: Whether several nodes are refused.
        one_bucket_each: Whether each gradient is averaged separately.
        communicates: Whether there is any communication.
        on_host: Whether it takes gradients in host memory.
        on_device: How gradients on devices are averaged: by ``"mpi"``, ``"nccl"`` among all ranks, ``"nodes"`` for NCCL
            within nodes and MPI across, ``"staged"`` through host memory, or ``"alone"`` for not at all.
    """

    talkers: int | None = 0
    one_node: bool = False
    one_bucket_each: bool = False
    communicates: bool = True
    on_host: bool = True
    on_device: str = "nodes"


TRAITS = {
    "naive": Traits(one_bucket_each=True, on_device="mpi"),
    "flat": Traits(on_device="mpi"),
    "hierarchical": Traits(talkers=1),
    "two_dimensional": Traits(talkers=None),
    "single_node": Traits(talkers=None, one_node=True),
    "non_cuda_aware": Traits(talkers=None, on_device="staged"),
    "pure_nccl": Traits(on_host=False, on_device="nccl"),
    "dummy": Traits(communicates=False, on_device="alone"),
}


class Strategy:
    """A way to average buckets over all ranks of a communicator; creating one is collective.

    Args:
        name: One of :data:`TRAITS`.
        context: The ranks, and the communicators derived from them.
        compressor: Averages across nodes, and among the ranks of a single node, in fewer bytes; ``None`` to average
            exactly.

    Attributes:
        traits: The properties of the strategy.
        size: How many ranks there are.
        shares_memory: Whether new buckets are allocated in memory that the ranks of a node share.
        talkers: How many ranks of each node own a share of a bucket, and exchange it with other nodes.
        on_device: Its counterpart for buckets on devices, which :mod:`mn_comm.device` chooses when it is first needed.

    Raises:
        ValueError: The strategy cannot work on these nodes (on every rank).
    """

    def __init__(self, name: str, context: Context, compressor: Compressor | None = None) -> None:
        self.name = name
        self.compressor = compressor
        self.traits = TRAITS[name]
        self.context = context
        self.on_device: Any = None
        topology = context.topology
        self.size = topology.size
        if self.traits.one_node and topology.inter_size != 1:
            raise ValueError(f"{name}: expected all ranks on one node, got {topology.inter_size} nodes")
        if self.traits.on_device == "nccl":
            with agreement.raise_on_all(context.ranks):  # NCCL itself starts with the first gradients, on their device
                device_backend().require_nccl()
        # If each node has only one rank, memory is not shared.
        self.shares_memory = self.traits.talkers != 0 and topology.most_intra_size > 1
        if compressor is not None and topology.inter_size == 1:
            self.shares_memory = False  # all ranks exchange data, as if each were a node
        # On a single node, no rank communicates with other nodes, and every rank keeps the part that it adds up.
        self.talkers = (
            topology.least_intra_size if topology.inter_size == 1 else self.traits.talkers or topology.least_intra_size
        )

    def average(self, bucket: Bucket, divisor: int) -> None:
        """Overwrite a bucket, or the gradients that it holds, with their sum over all ranks, divided; collective.

        If gradients have owners, this applies to the elements that this rank owns.

        Args:
            bucket: Of the same length and dtype on every rank.
            divisor: The divisor of the sum: the number of ranks, for the mean.
        """
        at_end = divisor if bucket.divides_at_end else 1
        if bucket.shares_memory and self.context.topology.inter_size == 1:
            self.reduce_scatter(bucket, divisor / at_end, at_end)
            if not bucket.ranges.are_shares:
                self.all_gather(bucket, at_end, bucket.to_come)
        else:
            groups = self.context.topology.inter_size if bucket.shares_memory else self.size
            # The mean over the groups follows, so each sum is first divided by the number of ranks per group.
            self.reduce_scatter(bucket, divisor / groups if self.traits.communicates else 1)
            self.average_across(bucket)
            self.all_gather(bucket)

    def reduce_scatter(self, bucket: Bucket, divisor: float = 1, at_end: int | None = None) -> _Array:
        """Add up, over this node, the share of a bucket that belongs to this rank; collective within the node.

        Args:
            bucket: Of the same length and dtype on every rank.
            divisor: The divisor of the sum.
            at_end: If the sum is final, the divisor that :meth:`all_gather` will use: this rank's share is then stored
                immediately, while it is in the cache.

        Returns:
            The share, a view of memory that the other ranks of the node can access; empty on a rank without a share.
        """
        bucket.put(bucket.others if bucket.shares_memory else bucket.blocks)
        if not bucket.shares_memory:
            divide(bucket.share, divisor, bucket.share)
            return bucket.share
        self.context.within.Barrier()
        mine = self.context.topology.intra_rank
        for block in bucket.own:
            summands = list(block.segments)
            summands[mine] = bucket.read(block)
            # The other owner's own memory holds its summand.
            is_direct = block.owner == mine and divisor == 1 and not bucket.is_half
            total = block.sum if is_direct else block.total
            add_up(summands, total)
            if not is_direct:
                divide(total, divisor, block.sum)
            if at_end is not None and block.is_kept:
                bucket.store((block,), at_end)
        if bucket.are_shares_added_up_together:
            self.context.within.Barrier()  # other ranks have written parts of the share
        return bucket.share

    def average_across(self, bucket: Bucket) -> None:
        """Average a bucket's share over nodes or, without nodes, the whole bucket over all ranks; collective."""
        if bucket.shares_memory or self.traits.communicates:
            ranks = self.context.across if bucket.shares_memory else self.context.ranks
            if not bucket.ranges.owners:
                self.mean_across(ranks, bucket.share, bucket.exchanged)
            elif bucket.share.size:
                mean_to_each(ranks, bucket.share, bucket.ranges.destinations)

    def mean_across(self, ranks: Ranks, share: _Array, what: Exchanged) -> None:
        """Overwrite a part of a bucket with its mean over ranks on different nodes; collective among them.

        Args:
            ranks: The ranks.
            share: The part, in host memory.
            what: Identifies the part and its bucket.
        """
        if not share.size:
            return
        if self.compressor is None:
            mean_in_place(ranks, share)
        else:
            self.compressor.average(Transport(ranks), share, what)

    def all_gather(self, bucket: Bucket, divisor: int = 1, blocks: Sequence[Block] | None = None) -> None:
        """Write a bucket whose shares are final to the target arrays; collective within the node.

        Args:
            bucket: After :meth:`reduce_scatter`.
            divisor: The divisor by which the elements still have to be divided.
            blocks: The blocks that are not stored yet; by default, all that this rank needs.
        """
        if bucket.shares_memory:
            self.context.within.Barrier()
        bucket.store(bucket.kept if blocks is None else blocks, divisor)

    def settle(self, bucket: Bucket) -> None:
        """Wait until no rank reads another rank's memory for a bucket; collective within the node."""
        if bucket.shares_memory:
            self.context.within.Barrier()

    def mean_of(self, array: _Array) -> _Array:
        """Return the mean over all ranks of an array that is in no bucket; collective.

        Args:
            array: One-dimensional, of floats, of the same length and dtype on every rank.
        """
        mean = np.array(array)
        if self.traits.communicates:
            mean_in_place(self.context.ranks, mean)
        return mean

    def allocate(self, nbytes: int, lasting: bool) -> list[_Array]:
        """Return memory for buckets: of all ranks of the node if they share it, or of this rank; collective.

        If they cannot share memory, all ranks use messages from then on, and rank 0 warns.

        Args:
            nbytes: The size in bytes.
            lasting: Whether it is needed for more than one average.
        """
        if self.shares_memory:
            try:
                with agreement.raise_on_all(self.context.ranks):
                    return share(self.context.within, nbytes) if lasting else self.context.memory.require(nbytes)
            except OSError as error:
                self.shares_memory = False
                if self.context.topology.rank == 0:
                    warnings.warn(f"gradients are averaged by messages, not in shared memory: {error}", stacklevel=2)
        return [np.empty(nbytes, np.uint8)]
