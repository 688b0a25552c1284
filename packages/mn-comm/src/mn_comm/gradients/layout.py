"""The layout of gradients in buckets, and of buckets in memory; created when gradients are first seen, and reused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from mn_comm.basis.arithmetic import is_half
from mn_comm.basis.config import Config
from mn_comm.basis.placement import device_backend
from mn_comm.gradients.blocks import cut_into_blocks, scratch_memory
from mn_comm.gradients.bucket import Bucket
from mn_comm.gradients.filling import Owners, Ownership, fill_buckets
from mn_comm.gradients.interfaces import AnyBucket
from mn_comm.gradients.parts import Exchanged, Part, Ranges, Spec, count
from mn_comm.gradients.share_size import ShareSize
from mn_comm.gradients.signature import ON_DEVICE, Signature
from mn_comm.gradients.strategy import Strategy

# A bucket's memory is used again two buckets later: by then, all ranks have met in the bucket between.
_SLOTS = 2
_ALIGNMENT = 64
_MOST_LAYOUTS = 8


class BucketSet(NamedTuple):
    """Buckets that hold each gradient once, in the order in which they are sent."""

    buckets: list[AnyBucket]
    flattened: list[int]  # the positions of gradients that must be one-dimensional to be averaged in place


class Layout:
    """How gradients with certain names, shapes, dtypes and devices are placed in buckets.

    Args:
        likes: For each gradient an array of the same shape and dtype, on the same device.
        order: The names of parameters in the order in which their gradients are to be sent; the others follow.
        bucket_bytes: The maximum size of a bucket; ``None`` for one that suits the strategy.
        whole: Whether gradients must not be split; then a bucket may hold a single gradient that is larger.
        lasting: Whether buckets keep their memory; otherwise the next buckets reuse it immediately.
        owners: Which rank alone needs the mean of which gradient, if the gradient is in host memory; ``None`` if all
            ranks need all means. With owners, creating a layout is collective.
    """

    def __init__(
        self,
        strategy: Strategy,
        signature: Signature,
        likes: Sequence[Any],
        order: Sequence[str],
        config: Config,
        *,
        bucket_bytes: int | None,
        whole: bool,
        lasting: bool,
        owners: Owners | None = None,
    ) -> None:
        # The gradients' names, shapes and dtypes.
        self.specs: list[Spec] = [(name, shape, dtype) for name, shape, dtype, *_ in signature]
        self.nbytes = sum(count(shape) * dtype.itemsize for _, shape, dtype in self.specs)  # their size, all together
        self.share_size = ShareSize()  # how often ranks meet, if there is a choice
        self.number = next(strategy.context.numbers)  # the same on all ranks, and different from every other layout's
        self.order = order
        self.strategy = strategy
        self.config = config
        self._bucket_bytes = bucket_bytes
        self._whole = whole
        self.lasting = lasting
        self._made: dict[int, BucketSet] = {}
        position_of = {spec[0]: position for position, spec in enumerate(self.specs)}
        first = [position_of[name] for name in order if name in position_of]
        everything = dict.fromkeys([*first, *range(len(self.specs))])
        device = {position for position, entry in enumerate(signature) if ON_DEVICE in entry[3:]}
        self._ownership = None if owners is None else Ownership(strategy, owners, self.specs)
        self._on_host = [position for position in everything if position not in device]
        self._on_device = [position for position in everything if position in device]
        self._like_on_device = [likes[position] for position in self._on_device]

    def buckets(self, buffer_index: int = 0) -> BucketSet:
        """Return the buckets, of one of several sets if buckets keep their memory; collective when they are created."""
        key = self._key(buffer_index)
        found = self._made.get(key)
        if found is None:
            on_host = self._lay_out_on_host()
            flattened = sorted({member for bucket in on_host for member in bucket.flattened})
            found = self._made[key] = BucketSet([*on_host, *self._lay_out_on_device()], flattened)
        return found

    def has_buckets(self, buffer_index: int) -> bool:
        """Return whether a set of buckets has been created."""
        return self._key(buffer_index) in self._made

    def _key(self, buffer_index: int) -> int:
        return self.share_size.share_bytes if self._chooses_share_size else buffer_index

    def _lay_out_on_host(self) -> list[Bucket]:
        for_all, limit = self._on_host, self._limit()
        filled: list[tuple[list[Part], Ranges | None]] = []
        if self._ownership is not None:
            owned = self._ownership.fill(self.specs, for_all, limit, whole=self._whole)
            filled = [(parts, self._ownership.ranges(parts)) for parts in owned]
            for_all = [member for member in for_all if not self._ownership.has(member)]
        filled += [(parts, None) for parts in fill_buckets(self.specs, for_all, limit, whole=self._whole)]
        buckets = self._make_buckets(filled, self.lasting)
        return self._lay_out_on_host() if buckets is None else buckets

    def _lay_out_on_device(self) -> list[Any]:
        if not self._on_device:
            return []
        filled = list(fill_buckets(self.specs, self._on_device, self._bucket_bytes, whole=True))
        return device_backend().lay_out(self, filled, self._like_on_device)

    def staging_buckets(self, filled: Sequence[Sequence[Part]]) -> list[Bucket]:
        """Return buckets in host memory, through which buckets of these parts on devices are averaged; collective."""
        with_all = [(parts, None) for parts in filled]
        # Other ranks may still be reading the memory that buckets of gradients in host memory have used just before.
        lasting = self.lasting or bool(self._on_host)
        buckets = self._make_buckets(with_all, lasting)
        return self.staging_buckets(filled) if buckets is None else buckets

    def _make_buckets(
        self, filled: Sequence[tuple[Sequence[Part], Ranges | None]], lasting: bool
    ) -> list[Bucket] | None:
        """Return buckets in host memory, or ``None`` if memory cannot be shared; collective.

        ``filled`` has the parts of each, and the ranges for each rank, unless all ranks get all means.
        """
        if not filled:
            return []
        strategy, specs = self.strategy, self.specs
        shares_memory = strategy.shares_memory
        # MPI adds up only numbers in this machine's byte order.
        own = [specs[parts[0].member][2].newbyteorder("=") for parts, _ in filled]
        dtypes = [self.config.allreduce_grad_dtype or each for each in own]
        nbytes = [parts[-1].end * dtype.itemsize for (parts, _), dtype in zip(filled, dtypes, strict=True)]
        places = _places(nbytes, len(filled) if lasting else _SLOTS if shares_memory else 1)
        segments = strategy.allocate(max(end for _, end in places), lasting)
        if strategy.shares_memory != shares_memory:
            return None
        mine = strategy.place
        room = scratch_memory(strategy)
        buckets: list[Bucket] = []
        for (parts, ranges), dtype, (begin, end) in zip(filled, dtypes, places, strict=True):
            views = [segment[begin:end].view(dtype) for segment in segments]
            if ranges is None:
                ranges = Ranges([], strategy.shares_of(views[mine].size), [])
            blocks, flattened = cut_into_blocks(parts, specs, ranges, views, room, strategy, self.lasting)
            exchanged = Exchanged(self.number, parts, specs, 0)
            bucket = Bucket(len(buckets), exchanged, views[mine], segments[mine], blocks, flattened, ranges, strategy)
            buckets.append(bucket)
        return buckets

    @property
    def form(self) -> tuple[Any, ...]:
        """The settings that decide, beside the gradients, which elements this rank exchanges with which ranks."""
        dtype = self.config.allreduce_grad_dtype
        limits = (self._limit(), self._bucket_bytes, self._whole, dtype and dtype.name)
        places = (tuple(self._on_host), tuple(self._on_device))
        return (*limits, *places, *self.strategy.form)

    @property
    def _chooses_share_size(self) -> bool:
        """Whether ranks can choose how often to meet: if everything is added up in one step, in shared memory."""
        is_free = self._bucket_bytes is None and not self.lasting
        return is_free and self.strategy.takes_one_step

    def _limit(self) -> int:
        """Return the maximum size in bytes of a bucket in host memory."""
        if self._chooses_share_size:
            return self.share_size.share_bytes * self.strategy.context.topology.intra_size
        return self.strategy.bucket_bytes(self.lasting) if self._bucket_bytes is None else self._bucket_bytes


class Layouts:
    """The layouts of a few sets of gradients, for example those of a generator and of a discriminator."""

    def __init__(self) -> None:
        self._of: dict[tuple[Signature, tuple[str, ...]], Layout] = {}
        self._latest: tuple[Signature, tuple[str, ...], Layout] | None = None

    def find(self, signature: Signature, order: tuple[str, ...] = ()) -> Layout | None:
        """Return the layout of gradients that are sent in this order, if there is one."""
        # Usually nothing has changed, and comparing objects is faster than looking up a long tuple.
        if self._latest is None or self._latest[0] is not signature or self._latest[1] != order:
            layout = self._of.get((signature, order))
            if layout is None:
                return None
            self._latest = signature, order, layout
        return self._latest[-1]

    def make_room(self) -> list[Layout]:
        """Drop the oldest layout if there are too many for another one; return what was dropped."""
        return [self._of.pop(next(iter(self._of))) for _ in range(len(self._of) - _MOST_LAYOUTS + 1)]

    def add(self, layout: Layout, signature: Signature, order: tuple[str, ...] = ()) -> None:
        """Keep a new layout."""
        self.make_room()
        self._of[signature, order] = layout
        self._latest = signature, order, layout


def check_gradients(entries: Signature, strategy: Strategy) -> None:
    """Raise TypeError if gradients with these entries of a signature cannot be averaged."""
    for name, _, dtype, *_ in entries:
        if not (dtype.kind == "f" or is_half(dtype)):
            raise TypeError(f"multi_node_mean_grad: expected gradients of floats, got dtype {dtype} for {name}")
    for name, shape, dtype, *place in entries:
        if ON_DEVICE not in place:
            strategy.check((name, shape, dtype))


def _places(nbytes: Sequence[int], slots: int) -> list[tuple[int, int]]:
    """Return where each bucket of the given size begins and ends in memory for a given number of buckets."""
    rounded = [-(-n // _ALIGNMENT) * _ALIGNMENT for n in nbytes]
    if slots == len(nbytes):
        begins = [0, *itertools.accumulate(rounded)]
    else:
        begins = [i % slots * max(rounded) for i in range(len(rounded))]
    return [(begin, begin + n) for begin, n in zip(begins, nbytes, strict=False)]
