"""Steps 3 to 5: packing gradients into buckets, averaging these, and unpacking them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mn_comm.basis.arithmetic import add_up, divide, is_half
from mn_comm.gradients.blocks import Block
from mn_comm.gradients.interfaces import check_floats
from mn_comm.gradients.parts import Arrays, Exchanged, Ranges
from mn_comm.gradients.strategy import Strategy
from mn_comm.ranks.background import Future

_Array = np.ndarray[Any, Any]


class Bucket:
    """Gradients of one dtype, in host memory, that are averaged together.

    If a bucket averages *in place*, its elements are read directly from the gradients, and the means are written
    directly to them. Otherwise, the bucket's own memory holds both.
    """

    needs_agreement = False  # the worker that averages it ensures this

    def __init__(
        self,
        index: int,
        exchanged: Exchanged,
        flat: _Array,
        memory: _Array,
        blocks: Sequence[Block],
        flattened: set[int],
        ranges: Ranges,
        strategy: Strategy,
    ) -> None:
        context, mine, last = strategy.context, strategy.place, len(ranges.shares) - 1
        begin, end = (ranges.shares[min(place, last)] for place in (mine, mine + 1))
        self.index = index
        self.exchanged = exchanged._replace(begin=begin)  # describes `share`
        self.flat = flat  # this rank's memory for it, one-dimensional, of the dtype in which it is sent
        self.share = flat[begin:end]  # the part of `flat` that this rank owns, and exchanges with other nodes
        self.memory = memory  # all of this rank's memory of which `flat` is a part; other buckets may use the same part
        self.blocks = blocks
        self.flattened = flattened  # the gradients that must be one-dimensional, because blocks hold only parts of them
        self.ranges = ranges
        self.strategy = strategy
        self.shares_memory = strategy.shares_memory  # whether the ranks of a node can access each other's memory for it
        self.own = [block for block in blocks if block.adder == mine]  # those that this rank adds up
        self.others = [block for block in blocks if block.adder != mine]  # those that other ranks of the node add up
        self.kept = [block for block in blocks if block.is_kept]  # those whose means it needs: all, without owners
        self.to_come = [block for block in self.others if block.is_kept]  # of these, those that others add up
        # Whether ranks of the node add up parts of other ranks' shares.
        self.are_shares_added_up_together = any(block.adder != block.owner for block in blocks)
        self.parts = exchanged.parts
        self.members = [part.member for part in self.parts]
        self.names = [exchanged.specs[member][0] for member in self.members]
        self.shapes = [exchanged.specs[member][1] for member in self.members]
        self.is_half = is_half(flat.dtype)
        self.submit: Callable[[Callable[[], Any]], Future[Any]] = Future
        self._arrays: Arrays | None = None
        self.context = context
        # The ranks with which `share` is exchanged.
        self.across = context.across if self.shares_memory else context.ranks
        self._kept_parts = [part for part in self.parts if ranges.are_kept(part.begin, context.topology.rank)]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.flat.nbytes

    def average_in_place(self, arrays: Arrays) -> None:
        """Overwrite gradients with their means; they are one-dimensional if a block holds only a part of them."""
        self._arrays = arrays
        try:
            self.mean()
        finally:
            self._arrays = None

    def launch(self) -> Future[Any]:
        """See :meth:`.AnyBucket.launch`."""
        return self.submit(self.mean)

    def average(self, array: Any = None) -> Future[Any]:
        """See :meth:`.AnyBucket.average`."""
        if array is not None:
            check_floats(array)
            return self.submit(lambda: self.strategy.mean_of(array))

        def average() -> _Array:
            mean = self.mean()
            if self.shares_memory:
                self.context.within.Barrier()  # no rank reads another rank's memory for it any more
            return mean

        return self.submit(average)

    def mean(self) -> _Array:
        """Overwrite the bucket, or the gradients that it holds, with their mean over all ranks; collective.

        If gradients have owners, this applies to the elements that this rank owns. Return the bucket's memory.
        """
        size = self.strategy.size
        at_end = size if self._arrays is not None and not self.is_half else 1  # division, on the way to the gradients
        if self.shares_memory and self.context.topology.inter_size == 1:
            self._add_up_within(size / at_end, at_end)
            if not self.ranges.are_shares:
                self._store_within(self.to_come, at_end)
        else:
            groups = self.context.topology.inter_size if self.shares_memory else size
            # The mean over the groups follows, so each sum is first divided by the number of ranks per group.
            self._add_up_within(size / groups)
            self._average_across()
            self._store_within(self.kept)
        return self.flat

    def _add_up_within(self, divisor: float, at_end: int | None = None) -> None:
        """Add up, over this node, the share of the bucket that belongs to this rank, and divide it; collective there.

        With ``at_end``, the sum is final: this rank's share is stored immediately, while it is in the cache, divided by
        this number, as the other blocks will be.
        """
        self.put(self.others if self.shares_memory else self.blocks)
        if not self.shares_memory:
            divide(self.share, divisor, self.share)
            return
        self.context.within.Barrier()
        mine = self.context.topology.intra_rank
        for block in self.own:
            summands = list(block.segments)
            summands[mine] = self.read(block)
            # The other owner's own memory holds its summand.
            is_direct = block.owner == mine and divisor == 1 and not self.is_half
            total = block.sum if is_direct else block.total
            add_up(summands, total)
            if not is_direct:
                divide(total, divisor, block.sum)
            if at_end is not None and block.is_kept:
                self.store((block,), at_end)
        if self.are_shares_added_up_together:
            self.context.within.Barrier()  # other ranks have written parts of the share

    def _average_across(self) -> None:
        """Average this rank's share over nodes or, without nodes, the whole bucket over all ranks; collective."""
        if not self.strategy.communicates:
            return
        if not self.ranges.owners:
            self.strategy.mean_across(self.across, self.share, self.exchanged)
        elif self.share.size:
            self.strategy.reduce_scatter(self.across, self.share, self.ranges.destinations)

    def _store_within(self, blocks: Sequence[Block], divisor: int = 1) -> None:
        """Write blocks to the gradients, divided once more, when all shares are final; collective within the node."""
        if self.shares_memory:
            self.context.within.Barrier()
        self.store(blocks, divisor)

    def pack(self, arrays: Arrays) -> None:
        """See :meth:`.AnyBucket.pack`."""
        if any(arrays[member] is None for member in self.members):
            found = {member: arrays[member] for member in self.members}
            arrays = {i: np.zeros(*self.exchanged.specs[i][1:]) if grad is None else grad for i, grad in found.items()}
        _concatenate([arrays[part.member][part.within] for part in self.parts], self.flat)

    def unpack(self, arrays: Arrays, means: _Array) -> None:
        """See :meth:`.AnyBucket.unpack`."""
        for part in self._kept_parts:
            out = arrays[part.member][part.within]
            out[...] = means[part.begin : part.end].reshape(out.shape)

    def put(self, blocks: Sequence[Block]) -> None:
        """Copy the elements of blocks to the bucket's own memory."""
        if self._arrays is not None:
            for block in blocks:
                collect(block, self._arrays, block.mine)

    def read(self, block: Block) -> _Array:
        """Return the elements of a block: in place if possible, otherwise in its scratch memory."""
        if self._arrays is None:
            block.room[...] = block.mine
            return block.room
        if not block.pieces:
            array: _Array = block.select(self._arrays)
            if array.dtype == block.room.dtype:
                return array
        collect(block, self._arrays, block.room)
        return block.room

    def store(self, blocks: Sequence[Block], divisor: int) -> None:
        """Divide the sums of blocks, and write them from their owners' memory to their targets."""
        for block in blocks:
            if self._arrays is None:
                divide(block.sum, divisor, block.mine)
            else:
                distribute(block, block.sum, divisor, self._arrays)


def _concatenate(arrays: Sequence[_Array], out: _Array) -> None:
    # This is one call, because thousands of calls take longer than the copying itself. All arrays are floats; for
    # NumPy, converting between bfloat16 and float16 is "unsafe".
    np.concatenate(arrays, axis=None, out=out, casting="unsafe")


def collect(block: Block, arrays: Arrays, memory: _Array) -> None:
    """Copy the elements of a block to memory."""
    if block.pieces:
        _concatenate(block.select(arrays), memory)
    else:
        memory[...] = block.select(arrays)


def distribute(block: Block, memory: _Array, divisor: int, arrays: Arrays) -> None:
    """Divide the elements of a block in memory, and write them to the arrays."""
    if block.pieces:
        divide(memory, divisor, block.room)
        for array, piece in zip(block.select(arrays), block.pieces, strict=True):
            array[...] = piece
    else:
        divide(memory, divisor, block.select(arrays))
