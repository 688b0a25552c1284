"""Arrays that are owned by ranks: the owner's values are copied to all other ranks, into their existing arrays.

All arrays of an owner, one after the other, are its stream. The streams of all ranks are sent at the same time, in
rounds. In each round, every rank writes a chunk of its own stream to memory that its node shares, the nodes exchange
their chunks, and every rank reads the chunks of the others from there. Ranks that share no memory count as one node
each.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mn_comm.basis import wire
from mn_comm.basis.mpi import MPI
from mn_comm.basis.placement import is_device_array
from mn_comm.collectives.bcast import bcast_in_place
from mn_comm.gradients.parts import exchange_groups
from mn_comm.ranks import agreement
from mn_comm.ranks.spans import span

if TYPE_CHECKING:
    from mn_comm.gradients.strategies import Strategy

__all__ = ["OwnedArrays"]

_Array = np.ndarray[Any, Any]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Entry = tuple[str, tuple[int, ...], str, int, bool, int]
"""The name, shape and dtype of an array, how many bytes it has, whether it is on a device, and its owner."""

# The size of the chunks of all ranks together. Ranks wait for each other in every round; larger chunks do not fit the
# caches.
_ROUND_BYTES = 8 * 1024 * 1024
_LEAST_CHUNK_BYTES = 64 * 1024
_MOST_CHUNK_BYTES = 4 * 1024 * 1024
# A chunk is overwritten two rounds later: by then, all ranks have met in the round between.
_SLOTS = 2
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


class _Piece(NamedTuple):
    """Consecutive bytes of an array in a chunk.

    Attributes:
        member: The position of the array.
        begin: Where they begin in the array.
        end: Where they end.
        at: Where they begin in the chunk.
    """

    member: int
    begin: int
    end: int
    at: int


class _Plan(NamedTuple):
    """What is sent in which round.

    Attributes:
        digest: The same on all ranks that have the same arrays and owners.
        rounds: For each round, and each rank, the pieces of its chunk.
    """

    digest: int
    rounds: list[list[list[_Piece]]]


class OwnedArrays:
    """Gives all ranks the arrays that each of them owns.

    Args:
        strategy: How the communicator averages gradients: it says which ranks share memory.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._ranks = strategy.context.ranks
        self._room: _Room | None = None
        self._seen: tuple[object, ...] = ()
        self._signature: tuple[_Entry, ...] = ()
        self._plan = _Plan(0, [])

    def gather(self, named: Sequence[tuple[str, Any]], owners: Sequence[int], failure: Exception | None) -> None:
        """Overwrite arrays with the values of their owners; see :meth:`mn_comm.CommunicatorBase.all_gather_owned`."""
        if self._ranks.size == 1:
            _check(named, owners, 1)
            failure = failure or _find_read_only(named)
            if failure is not None:
                raise failure
            return
        if self._room is None:
            self._room = _Room(self._strategy)
        try:
            self._use_plan(named, owners, self._room.chunk_bytes)
            failure = failure or _find_read_only(named)
        except (TypeError, ValueError) as error:
            failure = failure or error
            self._seen, self._signature, self._plan = (), (), _Plan(0, [])
            named = ()
        digest = self._plan.digest
        numbers = np.array([digest, -digest, failure is not None], np.int64)
        self._ranks.Allreduce(MPI.IN_PLACE, numbers, MPI.MAX)
        highest, negative_of_lowest, has_failed = numbers.tolist()
        if highest == -negative_of_lowest:
            self._gather(self._room, named, owners)
            if not has_failed:
                return
        with agreement.raise_on_all(self._ranks):
            if failure is not None:
                raise failure
        raise _explain(self._ranks.allgather(self._signature))

    def _gather(self, room: _Room, named: Sequence[tuple[str, Any]], owners: Sequence[int]) -> None:
        """Gather arrays, of which all ranks have the same; collective."""
        on_device = [i for i, (_, array) in enumerate(named) if is_device_array(array)]
        targets = {i: _Target(named[i][1]) for i in sorted(set(range(len(named))).difference(on_device))}
        mine = self._ranks.rank
        with span("gather"):
            for chunks in self._plan.rounds:
                memory = room.next_slot()
                for member, begin, end, at in chunks[mine]:
                    memory[mine][at : at + end - begin] = targets[member].bytes[begin:end]
                room.exchange([chunk[-1].at + chunk[-1].end - chunk[-1].begin if chunk else 0 for chunk in chunks])
                for rank in range(self._ranks.size):
                    for member, begin, end, at in chunks[rank] if rank != mine else ():
                        targets[member].bytes[begin:end] = memory[rank][at : at + end - begin]
            for i in on_device:
                bcast_in_place(self._ranks, named[i][1], owners[i])
            for target in targets.values():
                target.finish()

    def _use_plan(self, named: Sequence[tuple[str, Any]], owners: Sequence[int], chunk_bytes: int) -> None:
        # For thousands of arrays, it is faster to compare each attribute for all of them than to create an entry for
        # each.
        names, arrays = [name for name, _ in named], [array for _, array in named]
        seen: tuple[object, ...] = ()
        with contextlib.suppress(AttributeError):  # something is no array, as the check says
            seen = (names, list(map(_SHAPE, arrays)), list(map(_DTYPE, arrays)), list(map(type, arrays)), list(owners))
        if seen and seen == self._seen:
            return
        _check(named, owners, self._ranks.size)
        signature = tuple(
            (name, array.shape, str(array.dtype), array.nbytes, is_device_array(array), owner)
            for (name, array), owner in zip(named, owners, strict=True)
        )
        plan = _make_plan(signature, self._ranks.size, chunk_bytes)
        self._seen, self._signature, self._plan = seen, signature, plan


class _Target:
    """The bytes, in C order, of an array in host memory of any memory layout."""

    def __init__(self, array: _Array) -> None:
        self._array = array
        is_plain = array.flags.c_contiguous and array.flags.writeable
        self._contiguous = array if is_plain else np.array(array, order="C")
        self.bytes: _Bytes = self._contiguous.reshape(-1).view(np.uint8)

    def finish(self) -> None:
        """Write the received bytes to the array, if they are in a temporary one."""
        if self._contiguous is not self._array and self._array.flags.writeable:
            self._array[...] = self._contiguous


class _Room:
    """Memory for all ranks' chunks, shared within each node; creating it is collective.

    Each node has some ranks that communicate with other nodes, its leaders. A leader exchanges the chunks of some of
    the node's ranks with its peers on the other nodes. These chunks are adjacent in the leader's part of the memory,
    node by node.

    Args:
        strategy: How the communicator averages gradients.

    Attributes:
        chunk_bytes: The maximum length of a chunk.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        context = strategy.context
        size = context.topology.size
        self.chunk_bytes = max(_LEAST_CHUNK_BYTES, min(_MOST_CHUNK_BYTES, _ROUND_BYTES // size))
        places = context.ranks.allgather((context.topology.inter_rank, context.topology.intra_rank))
        while True:
            shares_memory = strategy.shares_memory
            if not shares_memory:
                places = [(rank, 0) for rank in range(size)]
            groups = exchange_groups(places, context.topology.least_intra_size if shares_memory else 1)
            most = max(sum(map(len, nodes)) for nodes in groups)
            parts = strategy.allocate(_SLOTS * most * self.chunk_bytes, lasting=True)
            if strategy.shares_memory == shares_memory:
                break
        self._within = context.within if shares_memory else None
        self._across = context.across if shares_memory else context.ranks
        mine = places[context.topology.rank][1]
        # What this rank exchanges: the ranks whose chunks it sends, by node, and where these chunks begin.
        self._group = groups[mine] if mine < len(groups) and self._across.size > 1 else []
        self._slots: list[list[_Bytes]] = []
        self._regions: list[_Bytes] = []
        for slot in range(_SLOTS):
            chunks: dict[int, _Bytes] = {}
            for leader, nodes in enumerate(groups):
                region = parts[leader].reshape(_SLOTS, -1)[slot]
                for i, rank in enumerate(itertools.chain.from_iterable(nodes)):
                    chunks[rank] = region[i * self.chunk_bytes : (i + 1) * self.chunk_bytes]
                if leader == mine:
                    self._regions.append(region)
            self._slots.append([chunks[rank] for rank in range(size)])
        self._turn = 0
        self._exchanges_messages = len(groups[0]) > 1

    def next_slot(self) -> list[_Bytes]:
        """Return the memory of all ranks' chunks in the next round."""
        self._turn = (self._turn + 1) % _SLOTS
        return self._slots[self._turn]

    def exchange(self, ends: Sequence[int]) -> None:
        """Wait until the chunks of all ranks, which end there, have arrived; collective."""
        if self._exchanges_messages and self._within is not None:
            self._within.Barrier()
        if self._group:
            ranges, begin = [], 0
            for ranks in self._group:
                last = begin + (len(ranks) - 1) * self.chunk_bytes
                ranges.append(slice(begin, last + ends[ranks[-1]]))
                begin = last + self.chunk_bytes
            self._strategy.all_gather(self._across, self._regions[self._turn], ranges)
        if self._within is not None:
            self._within.Barrier()


@functools.lru_cache(maxsize=8)  # scripts may alternate between a few sets of arrays
def _make_plan(signature: tuple[_Entry, ...], size: int, chunk_bytes: int) -> _Plan:
    """Cut the arrays of each owner into chunks."""
    streams: list[list[list[_Piece]]] = [[] for _ in range(size)]
    ends = [chunk_bytes] * size
    for member, (*_, length, is_on_device, owner) in enumerate(signature):
        nbytes, begin = 0 if is_on_device else length, 0
        while begin < nbytes:
            if ends[owner] == chunk_bytes:
                streams[owner].append([])
                ends[owner] = 0
            end = min(nbytes, begin + chunk_bytes - ends[owner])
            streams[owner][-1].append(_Piece(member, begin, end, ends[owner]))
            ends[owner] += end - begin
            begin = end
    rounds = [[stream[i] if i < len(stream) else [] for stream in streams] for i in range(max(map(len, streams)))]
    return _Plan(agreement.digest(signature), rounds)


def _explain(signatures: Sequence[tuple[_Entry, ...]]) -> Exception:
    rank = next(rank for rank, other in enumerate(signatures) if other != signatures[0])
    expected, got = next((a, b) for a, b in itertools.zip_longest(signatures[0], signatures[rank]) if a != b)
    error = ValueError(
        f"all_gather_owned: expected the same arrays and owners on every rank, but rank {rank} differs from rank 0: "
        f"{_describe(expected)} on rank 0, {_describe(got)} on rank {rank}"
    )
    return agreement.everywhere(error)


def _describe(entry: _Entry | None) -> str:
    if entry is None:
        return "nothing more"
    name, shape, dtype, _, is_on_device, owner = entry
    return f"{name} of shape {shape} and dtype {dtype}{' on a device' * is_on_device}, owned by rank {owner},"


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
