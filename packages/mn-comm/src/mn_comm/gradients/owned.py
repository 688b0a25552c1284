"""Arrays that are owned by ranks: the owner's values are copied to all other ranks, into their existing arrays.

They travel in buckets like those of gradients that have owners, in the opposite direction: as bytes, because nothing is
added up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis import wire
from mn_comm.basis.config import Config
from mn_comm.basis.placement import is_device_array
from mn_comm.collectives.arrays import bcast_in_place
from mn_comm.gradients.agree import Agreement, outline
from mn_comm.gradients.bucket import Bucket, collect, distribute
from mn_comm.gradients.filling import Owners
from mn_comm.gradients.layout import Layout, Layouts
from mn_comm.gradients.signature import FAILURE, Signature, signature_of
from mn_comm.ranks import agreement
from mn_comm.ranks.spans import span

if TYPE_CHECKING:
    from mn_comm.gradients.strategy import Strategy

_Array = np.ndarray[Any, Any]

# Ranks wait for each other in every bucket; larger buckets do not fit the caches.
_BUCKET_BYTES = 8 * 1024 * 1024


class OwnedArrays:
    """Gives all ranks the arrays that each of them owns, by the strategy with which gradients are averaged."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._ranks = strategy.context.ranks
        self._agreement = Agreement(self._ranks, "all_gather_owned")
        self._seen: tuple[object, ...] = ()
        self._signature: Signature = ()
        self._layouts = Layouts()

    def gather(self, named: Sequence[tuple[str, Any]], owners: Sequence[int], failure: Exception | None) -> None:
        """Overwrite arrays with the values of their owners; see :meth:`mn_comm.CommunicatorBase.all_gather_owned`."""
        unusable: Exception | None = None
        try:
            self._look_at(named, owners)
            failure = failure or _find_read_only(named)
        except (TypeError, ValueError) as error:
            unusable = failure or error
            self._seen, self._signature = (), ((FAILURE, *agreement.describe(unusable)),)
        try:
            (has_failed, *_) = self._agreement.check(self._signature, (failure is not None,))
        finally:
            if unusable is not None:
                raise unusable
        if self._ranks.size > 1:
            self._gather(named, owners)
        if has_failed:
            with agreement.raise_on_all(self._ranks):
                if failure is not None:
                    raise failure

    def _gather(self, named: Sequence[tuple[str, Any]], owners: Sequence[int]) -> None:
        """Gather arrays, of which all ranks have the same; collective."""
        owned = [(array, owner) for (_, array), owner in zip(named, owners, strict=True)]
        on_device = [each for each in owned if is_device_array(each[0])]
        on_host = [each for each in owned if not is_device_array(each[0])]
        targets = [_Target(array) for array, _ in on_host]
        with span("gather"):
            buckets: Sequence[Any] = self._layout([owner for _, owner in on_host], targets).buckets().buckets
            for bucket in buckets:
                _spread(bucket, [target.bytes for target in targets])
            for array, owner in on_device:
                bcast_in_place(self._ranks, array, owner)
            for target in targets:
                target.finish()

    def _look_at(self, named: Sequence[tuple[str, Any]], owners: Sequence[int]) -> None:
        """Check the arguments and find their signature, unless they are like those before."""
        seen: tuple[object, ...] = ()
        with contextlib.suppress(AttributeError):  # something is no array, as the check says
            seen = (outline([name for name, _ in named], [array for _, array in named]), list(owners))
        if seen and seen == self._seen:
            return
        _check(named, owners, self._ranks.size)
        entries = zip(signature_of(named), owners, strict=True)
        self._seen = seen
        self._signature = tuple((*entry, f"(owned by rank {owner})") for entry, owner in entries)

    def _layout(self, owners: Sequence[int], targets: Sequence[_Target]) -> Layout:
        """Return the layout of the arrays in host memory; collective if it is a new one."""
        layout = self._layouts.find(self._signature)
        if layout is None:
            layout = Layout(
                self._strategy,
                tuple((str(i), target.bytes.shape, target.bytes.dtype) for i, target in enumerate(targets)),
                (),
                (),
                Config(),
                bucket_bytes=_BUCKET_BYTES,
                whole=False,
                lasting=False,
                owners=Owners({str(i): owner for i, owner in enumerate(owners)}),
            )
            self._layouts.add(layout, self._signature)
        return layout


class _Target:
    """The bytes, in C order, of an array in host memory of any memory layout."""

    def __init__(self, array: _Array) -> None:
        self._array = array
        is_plain = array.flags.c_contiguous and array.flags.writeable
        self._contiguous = array if is_plain else np.array(array, order="C")
        self.bytes = self._contiguous.reshape(-1).view(np.uint8)

    def finish(self) -> None:
        """Write the received bytes to the array, if they are in a temporary one."""
        if self._contiguous is not self._array and self._array.flags.writeable:
            self._array[...] = self._contiguous


def _spread(bucket: Bucket, arrays: Sequence[_Array]) -> None:
    """Overwrite the arrays of a bucket with those of their owners, which are not added up; collective."""
    is_on_one_node = bucket.shares_memory and bucket.context.topology.inter_size == 1
    for block in bucket.kept:
        collect(block, arrays, block.segments[block.owner])
    if bucket.shares_memory:
        bucket.context.within.Barrier()
    if bucket.share.size and not is_on_one_node:
        bucket.strategy.all_gather(bucket.across, bucket.share, bucket.ranges.destinations)
    if bucket.shares_memory and not is_on_one_node:
        bucket.context.within.Barrier()
    for block in bucket.blocks:
        if not block.is_kept:
            distribute(block, block.segments[block.owner], 1, arrays)


def _check(arrays: Sequence[tuple[str, Any]], owners: Sequence[int], size: int) -> None:
    if len(arrays) != len(owners):
        raise ValueError(f"all_gather_owned: expected an owner for each of {len(arrays)} arrays, got {len(owners)}")
    for (name, array), owner in zip(arrays, owners, strict=True):
        wire.check_array(array, f"all_gather_owned: {name}")
        wire.check_rank(owner, size, f"owner of {name}")


def _find_read_only(arrays: Sequence[tuple[str, Any]]) -> ValueError | None:
    for name, array in arrays:
        if type(array) is np.ndarray and not array.flags.writeable:
            return ValueError(f"all_gather_owned: expected arrays that can be written to, got a read-only one: {name}")
    return None
