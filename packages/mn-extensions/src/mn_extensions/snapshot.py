"""Chainer's snapshot extension on several ranks, for training that can be resumed with any number of ranks."""

from __future__ import annotations

import os
import re
import warnings
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from chainer.serializers import npz
from chainer.training import Extension

from mn_comm import Change, CommunicatorBase, is_elastic, raise_on_all, transact
from mn_extensions.checkpoint.arrays import State, read_snapshot
from mn_extensions.checkpoint.replicas import assume_synchronized, consolidate, own_parts, synchronize
from mn_extensions.checkpoint.state import load_state


def multi_node_snapshot(
    comm: CommunicatorBase, snapshot: Any, replica_sets: Iterable[int | Iterable[int]]
) -> MultiNodeSnapshot:
    """Make a snapshot extension save one file for each group of ranks with the same state; collective.

    If rank 0 has extensions that the others do not have, such as ``LogReport``, there are two states: that of rank 0,
    and that of all other ranks. Then pass ``replica_sets=[0]``.

    If the snapshot has ``autoload=True``, all ranks start from the newest snapshot of which every set has a readable
    file, even if there are now more or fewer ranks. An iterator over a part of a different length then continues from
    the same fraction of the epoch, in a new order; one that does not shuffle keeps its position, unless this is beyond
    the end. Nothing in the files is unpickled. If all ranks have the same parameters after loading, no update is lost.

    Args:
        comm: The ranks.
        snapshot: What ``chainer.training.extensions.snapshot`` returned. Its file name gets the suffix ``.<rank>``,
            with the lowest rank of the set.
        replica_sets: Ranks, and groups of ranks, whose state is the same within a group. The remaining ranks form
            another group.

    Returns:
        The extension. As in Chainer 7, it does not take over trigger, priority and name of ``snapshot``: it is
        triggered every iteration, unless you pass a trigger to ``trainer.extend``, it has the priority of extensions
        that read, and its name is ``_MultiNodeSnapshot``.

    Raises:
        TypeError: ``replica_sets`` contains something other than ranks and groups of ranks (on every rank).
        ValueError: A rank is out of range or in two groups, or ``autoload`` is used with a function as the file name
            (on every rank).

    Example:
        >>> snapshot = chainer.training.extensions.snapshot()
        >>> snapshot = chainermn.extensions.multi_node_snapshot(comm, snapshot, replica_sets=[0])
        >>> trainer.extend(snapshot, trigger=(1, "epoch"))
    """
    replica_sets = list(replica_sets)

    def check() -> list[list[int]]:
        with raise_on_all(comm):
            if snapshot.autoload and callable(snapshot.filename):
                raise ValueError("expected a string as the file name of a snapshot with autoload, got a function")
            groups = parse_replica_sets(replica_sets, comm.size)
        return groups

    return MultiNodeSnapshot(comm, snapshot, transact(comm, check))


def parse_replica_sets(replica_sets: Iterable[int | Iterable[int]], size: int) -> list[list[int]]:
    """Return groups of ranks that contain each of ``size`` ranks once; see :func:`multi_node_snapshot`."""
    sets = [[each] if isinstance(each, (int, np.integer)) else sorted(set(each)) for each in replica_sets]
    seen: set[int] = set()
    for rank in (rank for each in sets for rank in each):
        if not 0 <= rank < size:
            raise ValueError(f"expected ranks in 0..{size - 1} in replica_sets, got {rank}")
        if rank in seen:
            raise ValueError(f"expected replica_sets that do not overlap, got rank {rank} twice in {sets}")
        seen.add(rank)
    rest = [rank for rank in range(size) if rank not in seen]
    return [each for each in (*sets, rest) if each]


class MultiNodeSnapshot(Extension):  # type: ignore[misc]  # Chainer has no types
    """See :func:`mn_extensions.multi_node_snapshot`."""

    # Snapshots hold the state of the extension's trigger under its name, which must be that of older snapshots.
    default_name = "_MultiNodeSnapshot"

    def __init__(self, comm: CommunicatorBase, snapshot: Any, sets: Sequence[Sequence[int]]) -> None:
        self.comm = comm
        self.snapshot = snapshot
        self._sets = [set(each) for each in sets]
        self._filename = snapshot.filename
        self._name_file()
        if is_elastic(comm):
            comm.on_change(weakref.WeakMethod(self._renumber))  # type: ignore[attr-defined]

    def _name_file(self) -> None:
        filename, comm = self._filename, self.comm
        self.snapshot.filename = (
            (lambda trainer: f"{filename(trainer)}.{comm.rank}") if callable(filename) else (f"{filename}.{comm.rank}")
        )

    def _renumber(self, change: Change) -> None:
        """Continue with the remaining ranks of each group, the lowest of which now saves."""
        numbers = {old: new for new, old in enumerate(change.survivors)}
        remaining = [{numbers[old] for old in each if old in numbers} for each in self._sets]
        self._sets = [each for each in remaining if each]
        self._name_file()

    @property
    def replica_set(self) -> set[int]:
        """The ranks of this rank's group."""
        return next(each for each in self._sets if self.comm.rank in each)

    @property
    def master(self) -> int:
        """The rank that saves for this rank's group."""
        return min(self.replica_set)

    @property
    def is_master(self) -> bool:
        """Whether this rank saves for its group."""
        return self.comm.rank == self.master

    def initialize(self, trainer: Any) -> None:
        """Load the newest snapshot if ``autoload`` was set; collective in that case."""
        autoload, self.snapshot.autoload = self.snapshot.autoload, False
        try:
            if self.is_master:
                self.snapshot.initialize(trainer)
        finally:
            self.snapshot.autoload = autoload
        # A spare that has joined already has the state, and the other ranks have passed this point long ago.
        if autoload and not getattr(self.comm, "is_catching_up", False):
            transact(self.comm, partial(self._load, self._target_of(trainer), Path(trainer.out)))

    def __call__(self, trainer: Any) -> None:
        """Save on the lowest rank of each group; collective."""
        target = self._target_of(trainer)
        synchronize(target)
        for each in self._sets:
            consolidate(target, to=min(each))
        if self.is_master:
            self.snapshot(trainer)

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        """Save if the snapshot is configured to save on errors."""
        if self.is_master:
            self.snapshot.on_error(trainer, exc, tb)

    def finalize(self) -> None:
        """Finalize the snapshot."""
        if self.is_master:
            self.snapshot.finalize()

    def _target_of(self, trainer: Any) -> Any:
        target = self.snapshot._target  # noqa: SLF001 - there is no public name
        return trainer if target is None else target

    def _load(self, target: Any, folder: Path) -> None:
        for name in self._candidates(folder):
            with raise_on_all(self.comm):  # for example if there is too little memory
                found = read_snapshot(folder / f"{name}.{self.comm.rank}") if self.is_master else None
            problem = found if isinstance(found, str) else None
            problems = [each for each in self.comm.allgather_obj(problem) if each is not None]
            if not problems and not isinstance(found, str):
                self._spread(found, target)
                return
            self._warn(f"{'; '.join(problems)}: trying the previous snapshot")

    def _warn(self, message: str) -> None:
        with raise_on_all(self.comm):  # if warnings are errors, all ranks raise
            if self.comm.rank == 0:
                warnings.warn(message, RuntimeWarning, stacklevel=6)

    def _candidates(self, folder: Path) -> list[str]:
        """Return the names, without rank, of snapshots of which every group has a file; newest first. Collective."""
        found: list[str] | None = None
        with raise_on_all(self.comm):
            if self.is_master and folder.is_dir():
                found = _snapshots(folder, self.snapshot.filename, self.comm.rank)
        everywhere = self.comm.allgather_obj((self.is_master, found or []))
        lists = [names for is_master, names in everywhere if is_master]
        common = [name for name in lists[0] if all(name in names for names in lists)]
        if any(lists) and not common:
            self._warn(f"{folder}: expected a snapshot of which each group has its file, got none: nothing is loaded")
        return common

    def _spread(self, state: State | None, target: Any) -> None:
        """Load a group's state on all of its ranks; collective."""
        if is_elastic(self.comm):  # it has no parts
            state = self.comm.allgather_obj(state)[self.master]
        else:
            group = self.comm.split(self.master, self.comm.rank)
            try:
                state = group.bcast_obj(state)
            finally:
                group.finalize()
        with raise_on_all(self.comm):
            load_state(fit_iterators(state or {}, target), target)
        assume_synchronized(target)


def fit_iterators(state: State, target: Any) -> State:
    """Return a state whose iterators fit datasets of other lengths.

    Args:
        state: The state of a trainer or an updater.
        target: The trainer or updater to be loaded.

    Returns:
        The state. If the dataset of an iterator had a different length, the iterator keeps its epoch and the fraction
        of it that is done, but gets the order of the target's iterator. Without shuffling, the length is not saved: the
        iterator keeps its position, or, if this is beyond the end, the fraction before the last mini-batch.
    """
    updater = getattr(target, "updater", None)
    if updater is None:
        return state
    fitted = dict(state)
    with own_parts(target):
        current = npz.serialize(updater)
    for name in current:
        match = re.fullmatch(r"(iterator:([^/]+)/.*)current_position", name)
        if match is not None and "updater/" + name in state:
            _fit_iterator(fitted, match[1], current, updater.get_iterator(match[2]))
    return fitted


def _fit_iterator(state: State, path: str, current: State, iterator: Any) -> None:
    """Change the state of one iterator, if its dataset had a different length."""
    position = f"updater/{path}current_position"
    order = next((name for name in (path + "order", path + "_order") if current.get(name, np.asarray(None)).ndim), None)
    if order is None:
        state[position] = np.asarray(_fit_position(state, f"updater/{path}", iterator))
    elif (saved := state.get("updater/" + order)) is not None and saved.shape != current[order].shape:
        state["updater/" + order] = current[order].copy()
        state[position] = np.asarray(int(state[position]) * len(current[order]) // max(1, len(saved)))


def _fit_position(state: State, path: str, iterator: Any) -> int:
    """Return the position of an iterator that does not shuffle."""
    position, length = int(state[path + "current_position"]), len(getattr(iterator, "dataset", ()))
    if not length or position <= length:
        return position
    begin = float(state.get(path + "previous_epoch_detail", 0)) - int(state[path + "epoch"])  # of the last mini-batch
    return max(0, round(begin * length))


def _snapshots(folder: Path, filename: str, rank: int) -> list[str]:
    """Return the names of files that a snapshot with this file name writes, without the rank, newest first."""
    prefix = filename.split("{")[0]
    suffix = filename.rsplit("}", maxsplit=1)[-1]
    files = []
    for entry in os.scandir(folder):
        if entry.name.startswith(prefix) and entry.name.endswith(suffix):
            with suppress(OSError):  # a link to nothing, or a file that another job has just removed
                files.append((entry.stat().st_mtime_ns, entry.name))
    return [name.removesuffix(f".{rank}") for _, name in sorted(files, reverse=True)]
