"""Step 4: which ranks share the work, and the messages between them. A communicator's name chooses the strategy.

Ranks of a node add up gradients in memory that they share, each a part (:mod:`mn_comm.gradients.bucket`). The leaders
of each node then exchange the sums with other nodes. The strategies that there are, are in
:mod:`mn_comm.gradients.strategies`. For arrays on devices see :mod:`mn_comm.device.strategies`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mn_comm.basis.lazy import load_later
from mn_comm.basis.mpi import MPI
from mn_comm.basis.placement import device_backend
from mn_comm.gradients.parts import Exchanged, Spec, bounds, even_or
from mn_comm.ranks import agreement
from mn_comm.ranks.shared_memory import share

if TYPE_CHECKING:
    from mn_comm import collectives
    from mn_comm.gradients.compression import Compressor
    from mn_comm.ranks.context import Context
    from mn_comm.ranks.intracomm import Ranks
else:
    collectives = load_later("mn_comm.collectives")

_Array = np.ndarray[Any, Any]

# If nodes play no role: small enough for the cache. Across nodes and in the background: large enough for the network.
_BUCKET_BYTES = 4 * 1024 * 1024
_BUCKET_BYTES_ACROSS = 16 * 1024 * 1024

ALL = sys.maxsize  # as many leaders per node as the smallest node has ranks


class Strategy:
    """A way to average gradients over all ranks of a communicator; creating one is collective.

    A subclass says by class attributes which ranks share the work. The methods :meth:`mean`, :meth:`reduce_scatter` and
    :meth:`all_gather` are all that sends messages between ranks, and can be replaced together: see "Add a communicator"
    in CONTRIBUTING.md.

    Args:
        context: The ranks, and the communicators derived from them.
        compressor: Averages across nodes, and among the ranks of a single node, in fewer bytes; ``None`` to average
            exactly.

    Attributes:
        name: The name of the communicators that average in this way.
        leaders_per_node: The number of ranks of a node that communicate with other nodes, each for its share of a
            bucket: a number, ``ALL``, or 0 if nodes play no role and all ranks communicate with each other.
        one_node: Whether several nodes are refused.
        packs: Whether gradients are packed into buckets; otherwise each is averaged by itself.
        communicates: Whether there is any communication.
        on_host: Whether gradients in host memory can be averaged.
        on_device: How gradients on devices are averaged: by ``"mpi"``, ``"nccl"`` among all ranks, ``"nodes"`` for NCCL
            within nodes and MPI across, ``"staged"`` through host memory, or ``"alone"`` for not at all.
        size: The number of ranks.
        shares_memory: Whether new buckets are allocated in memory that the ranks of a node share.
        n_leaders: The number of ranks of each node that own a share of a bucket if the node shares memory.
        counterpart: The strategy for buckets on devices, which :mod:`mn_comm.device` chooses when it is first needed.
        side_streams: By device, the stream beside the current one, which :mod:`mn_comm.device` makes when it is needed.

    Raises:
        ValueError: The strategy cannot work on these nodes (on every rank).
    """

    name: ClassVar[str] = ""
    leaders_per_node: ClassVar[int] = 0
    one_node: ClassVar[bool] = False
    packs: ClassVar[bool] = True
    communicates: ClassVar[bool] = True
    on_host: ClassVar[bool] = True
    on_device: ClassVar[str] = "staged"

    def __init__(self, context: Context, compressor: Compressor | None = None) -> None:
        self.context = context
        self.compressor = compressor
        self.counterpart: Any = None
        self.side_streams: dict[int, Any] = {}
        topology = context.topology
        self.size = topology.size
        if self.one_node and topology.inter_size != 1:
            raise ValueError(f"{self.name}: expected all ranks on one node, got {topology.inter_size} nodes")
        if self.on_device == "nccl":
            with agreement.raise_on_all(context.ranks):  # NCCL itself starts with the first gradients, on their device
                device_backend().require_nccl()
        # If each node has only one rank, memory is not shared.
        self.shares_memory = self.leaders_per_node > 0 and topology.most_intra_size > 1
        if compressor is not None and topology.inter_size == 1:
            self.shares_memory = False  # all ranks exchange data, as if each were a node
        # On a single node, no rank communicates with other nodes, and every rank keeps the part that it adds up.
        leaders = ALL if topology.inter_size == 1 else self.leaders_per_node or ALL
        self.n_leaders = min(leaders, topology.least_intra_size)

    def mean(self, ranks: Ranks, flat: _Array) -> None:
        """Overwrite an array with its mean over ranks; collective among them.

        Args:
            ranks: All ranks; or one rank of each node.
            flat: One-dimensional and contiguous, of floats, in host memory; of the same length and dtype on every rank.
        """
        collectives.mean_in_place(ranks, flat)

    def reduce_scatter(self, ranks: Ranks, flat: _Array, ranges: Sequence[slice]) -> None:
        """Overwrite, on each rank, its range of an array with the mean over ranks; collective among them.

        Elements outside this rank's range are lost. The arguments are those of :meth:`mean`, and ``ranges``: the range
        of each rank. Together, they are the array; in which order they lie is not specified.
        """
        collectives.mean_to_each(ranks, flat, ranges)

    def all_gather(self, ranks: Ranks, flat: _Array, ranges: Sequence[slice]) -> None:
        """Overwrite, on all ranks, the range of each rank with that rank's elements; collective among them.

        The arguments are those of :meth:`mean`, of any dtype, and ``ranges``: the range of each rank. They do not
        overlap, and need not be the whole array.
        """
        itemsize = flat.itemsize
        counts = [(each.stop - each.start) * itemsize for each in ranges]
        begins = [each.start * itemsize for each in ranges]
        ranks.Allgatherv(MPI.IN_PLACE, [flat.view(np.uint8), counts, begins, MPI.BYTE])

    @property
    def takes_one_step(self) -> bool:
        """Whether new buckets are averaged in shared memory alone: no rank communicates with other nodes."""
        return self.shares_memory and self.context.topology.inter_size == 1

    @property
    def place(self) -> int:
        """The number of this rank among those that share its memory."""
        return self.context.topology.intra_rank if self.shares_memory else 0

    @property
    def form(self) -> tuple[Any, ...]:
        """The settings that decide which elements of a bucket this rank exchanges with which ranks."""
        return (self.shares_memory, self.n_leaders, *self.context.topology)

    def bucket_bytes(self, is_large: bool) -> int:
        """Return the default maximum size of a bucket in host memory; with ``is_large``, large also on one node."""
        return _BUCKET_BYTES_ACROSS if self.shares_memory or is_large else _BUCKET_BYTES

    def shares_of(self, length: int) -> list[int]:
        """Return where the share of each leader begins in a bucket that all ranks need, and where the last one ends."""
        return bounds(length, self.n_leaders if self.shares_memory else 1)

    def adders_of(self, length: int, shares: Sequence[int]) -> Sequence[int]:
        """Return where the part begins that each rank of a node adds up, and where the last one ends, given shares."""
        return even_or(shares, bounds(length, self.context.topology.intra_size)) if self.shares_memory else [0]

    def check(self, spec: Spec) -> None:
        """Raise TypeError if a gradient in host memory cannot be averaged."""
        name, shape, dtype = spec
        if not self.on_host:
            raise TypeError(
                f"{self.name}: expected gradients in CuPy arrays, got a NumPy array of shape {shape} and dtype {dtype} "
                f"for {name}; every other communicator takes both"
            )

    def mean_across(self, ranks: Ranks, share: _Array, what: Exchanged) -> None:
        """Overwrite a part of a bucket with its mean over ranks on different nodes; collective among them."""
        if not share.size:
            return
        if self.compressor is None:
            self.mean(ranks, share)
        else:
            self.compressor.average(collectives.Transport(ranks), share, what)

    def mean_of(self, array: _Array) -> _Array:
        """Return the mean over all ranks of an array that is in no bucket, but like one; collective."""
        mean = np.array(array)
        if self.communicates:
            self.mean(self.context.ranks, mean)
        return mean

    def allocate(self, nbytes: int, lasting: bool) -> list[_Array]:
        """Return memory for buckets: of all ranks of the node if they share it, or of this rank; collective.

        If they cannot share memory, all ranks use messages from then on, and rank 0 warns. Memory that is not needed
        for more than one average (``lasting``) is the same the next time.
        """
        if self.shares_memory:
            try:
                with agreement.raise_on_all(self.context.ranks):
                    return share(self.context.within, nbytes) if lasting else self.context.memory.require(nbytes)
            except OSError as error:
                self.shares_memory = False
                message = f"gradients are averaged by messages, not in shared memory: {error}"
                agreement.warn(self.context.ranks, message)
        return [np.empty(nbytes, np.uint8)]
