"""The checkpointer: an extension that saves all ranks' states together, and resumes from the newest intact ones."""

from __future__ import annotations

import logging
import operator
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from chainer.training import Extension

from mn_comm import CommunicatorBase, expect_same, is_elastic, raise_on_all, transact
from mn_extensions.checkpoint.ending import ElasticEnding, Ending
from mn_extensions.checkpoint.files import FileRecord, check_writable
from mn_extensions.checkpoint.generations import Generations
from mn_extensions.checkpoint.replicas import assume_synchronized, own_parts, synchronize
from mn_extensions.checkpoint.state import check_fits, load_state, state_of
from mn_extensions.checkpoint.stats import CheckpointStats

logger = logging.getLogger(__name__)


def create_multi_node_checkpointer(
    name: str,
    comm: CommunicatorBase,
    cp_interval: int = 5,
    gc_interval: int = 5,
    path: str | os.PathLike[str] | None = None,
) -> MultiNodeCheckpointer:
    """Create an extension that saves the states of all ranks, so that training can be resumed; collective.

    Each rank writes ``<name>.<rank>.<iteration>``. When all ranks have done so, rank 0 writes
    ``<name>.manifest.<iteration>`` with the checksums of these files: only then is the checkpoint valid. Call
    ``maybe_load`` after all extensions have been added to the trainer, and before ``trainer.run()``. When training ends
    normally, the files are removed; when it ends with an exception, they are kept.

    The state of the trainer and of NumPy's global random number generator are saved and restored, so that training
    continues with the same batches and dropout masks as uninterrupted training. The state of CuPy's random number
    generator is not saved.

    Args:
        name: The name of the run, the same on every rank; dots are allowed, path separators are not.
        comm: The ranks that train together.
        cp_interval: How many checkpoints to keep.
        gc_interval: After how many saves to remove older ones.
        path: The folder for the files, on a local disk of each node or on a shared one; by default the trainer's
            ``out``.

    Returns:
        The extension.

    Raises:
        TypeError: An argument is of the wrong type (on every rank).
        ValueError: ``name`` cannot be part of a file's name, an interval is below 1, or the ranks' arguments differ
            (on every rank).
        OSError: ``path`` is given and cannot be written on some rank (on every rank).

    Example:
        >>> checkpointer = chainermn.create_multi_node_checkpointer("my-run", comm)
        >>> trainer.extend(checkpointer, trigger=(1000, "iteration"))
        >>> checkpointer.maybe_load(trainer)  # the iteration, if there is a checkpoint
    """
    return MultiNodeCheckpointer(name, comm, cp_interval, gc_interval, path)


class MultiNodeCheckpointer(Extension):  # type: ignore[misc]  # Chainer has no types
    """See :func:`mn_extensions.create_multi_node_checkpointer`.

    Attributes:
        stats: How long saving took on this rank.
    """

    # After all others, so that their state is in the checkpoint; Chainer's own snapshot does the same.
    priority = -100

    def __init__(
        self, name: str, comm: CommunicatorBase, cp_interval: int, gc_interval: int, path: str | os.PathLike[str] | None
    ) -> None:
        transact(comm, partial(_agree, comm, name, cp_interval, gc_interval))
        self.name = name  # the trainer may rename the extension, but not the files
        self.comm = comm
        self.cp_interval = cp_interval
        self.gc_interval = gc_interval
        self.path = None if path is None else os.fspath(path)
        self._run = name
        self.stats = CheckpointStats()
        self._generations: Generations | None = None  # until the folder is known
        self._has_failed = False
        self._n_saves = 0
        self._ending: Ending | ElasticEnding | None = None
        if self.path is not None:
            self._use_generations()

    def __call__(self, trainer: Any) -> None:
        """Save the trainer; collective."""
        self._use_folder(trainer)
        self.save(trainer, trainer.updater.iteration)

    def save(self, target: Any, iteration: int) -> None:
        """Save the states of all ranks; collective.

        If a rank cannot write its file (for example if its disk is full), all ranks warn and continue; older
        checkpoints are kept. A file that another program has written, such as a checkpoint of an older ChainerMN, is
        never replaced.

        Optimizers with local or asynchronous steps are synchronised before. If the optimizer state is sharded, each
        rank saves its own part.

        Args:
            target: What to save: a trainer, or anything else that Chainer can serialize.
            iteration: The number under which to save it, the same on every rank.

        Raises:
            RuntimeError: There is no folder yet: ``path`` was not given, and no trainer was saved or loaded.
            TypeError: The state on some rank contains Python objects (on every rank).
            OSError: On some rank there is a file of another program under the name (a ``FileExistsError`` on that one);
                or this is the first save, and the folder cannot be written on some rank (on every rank).
        """
        synchronize(target)
        self.stats.start()
        generations = self._use_generations()
        failure = transact(self.comm, partial(self._save, generations, target, iteration))
        if failure is not None:
            with raise_on_all(self.comm):  # if warnings are errors, all ranks raise
                warnings.warn(
                    f"the checkpoint of iteration {iteration} was not saved: {failure}; the training continues",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self.stats.end()

    def _save(self, generations: Generations, target: Any, iteration: int) -> str | None:
        """Save, and return why that failed, or ``None``; collective."""
        self._expect_ending()
        with raise_on_all(self.comm):  # before any rank writes
            generations.expect_free(iteration)
        with raise_on_all(self.comm), own_parts(target):
            report = generations.write(state_of(target), iteration)
        failure, kept = self._complete_generation(generations, iteration, self.comm.allgather_obj(report))
        generations.remove(generations.mine - kept)
        return failure

    def maybe_load(self, trainer: Any, optimizer: Any = None, path: str | os.PathLike[str] | None = None) -> int | None:
        """Load the newest checkpoint that is intact on every rank, if there is one; collective.

        If the checksum of a file is wrong, rank 0 warns, and the next older checkpoint is tried. Nothing is loaded
        before the checksums have been verified on every rank.

        Checkpoints of an older ChainerMN have the same names, but no manifest. The newest one of which every rank has a
        readable file can be loaded as well. They are never replaced or removed.

        Args:
            trainer: The trainer, or another object that was saved.
            optimizer: A multi-node optimizer. If all ranks have loaded the same parameters, its next update takes a
                step, rather than distribute the parameters of rank 0. By default, this applies to all optimizers of
                ``trainer``.
            path: The folder to use if none was given before; by default the trainer's ``out``.

        Returns:
            The iteration that was loaded, or ``None`` if there is no checkpoint.

        Raises:
            ValueError: The checkpoint was saved by a different number of ranks, or is of a different model (on every
                rank); then nothing was loaded. To continue with a different number of ranks, use
                :func:`mn_extensions.multi_node_snapshot`.
            OSError: The folder cannot be written on some rank (on every rank).
        """
        self._use_folder(trainer, path)
        return transact(self.comm, partial(self._load, self._use_generations(), trainer, optimizer))

    def _load(self, generations: Generations, trainer: Any, optimizer: Any) -> int | None:
        self._expect_ending()
        newest = generations.newest_unharmed(self.name or self._run)  # ChainerMN 7 named files after the extension
        if newest is None:
            return None
        with raise_on_all(self.comm), own_parts(trainer):
            check_fits(newest.state, trainer)
        with raise_on_all(self.comm):
            load_state(newest.state, trainer)
        assume_synchronized(trainer, optimizer)
        logger.info("resumed %s at iteration %d", self._run, newest.iteration)
        return newest.iteration

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        """Remember that training failed, so that ``finalize`` keeps the files."""
        self._has_failed = True

    def finalize(self) -> None:
        """Remove the files if training ended normally on every rank; collective, except on a rank where it did not.

        Called by the trainer, also when it ends with an exception; calling it again does nothing.
        """
        # on_error is not called for a KeyboardInterrupt, but finalize is, while that is on its way.
        has_failed = self._has_failed or sys.exc_info()[0] is not None
        if self._ending is not None and self._ending.is_well_on_all_ranks(not has_failed):
            self._use_generations().clear()

    def _expect_ending(self) -> None:
        """Prepare for the end of training; collective the first time."""
        if self._ending is None:  # not earlier: there may be thousands of checkpointers that never save
            self._ending = ElasticEnding(self.comm) if is_elastic(self.comm) else Ending(self.comm.mpi_comm)

    def get_stats(self) -> str:
        """Return how long saving took, as text: the mean, the shortest and the longest time in seconds."""
        return self.stats.report()

    @property
    def files(self) -> list[str]:
        """The names of the files that this rank has saved, or found, and not removed; the oldest first."""
        found = self._generations
        return [] if found is None else [found.path(iteration).name for iteration in sorted(found.mine)]

    def _use_folder(self, trainer: Any, path: str | os.PathLike[str] | None = None) -> None:
        if self.path is None and (path is not None or hasattr(trainer, "out")):
            self.path = os.fspath(trainer.out if path is None else path)

    def _use_generations(self) -> Generations:
        """Return the generations in the folder, which can be written; collective the first time."""
        if self._generations is None:
            folder = transact(self.comm, self._check_folder)  # a transaction: all ranks have come through, or none
            self._generations = Generations(self.comm, folder, self._run)
        return self._generations

    def _check_folder(self) -> Path:
        """Return the folder, which can be written; collective."""
        with raise_on_all(self.comm):
            if self.path is None:
                raise RuntimeError("expected a folder for the checkpoints: pass path to create_multi_node_checkpointer")
            folder = Path(self.path)
            check_writable(folder)
        return folder

    def _complete_generation(
        self, generations: Generations, iteration: int, reports: Sequence[FileRecord | str]
    ) -> tuple[str | None, frozenset[int]]:
        """Let rank 0 write the manifest, if every rank has written its file; collective.

        Returns:
            Why the generation is incomplete, or ``None``; and the iterations whose files are to be kept.
        """
        outcome = None
        if self.comm.rank == 0:
            failure = generations.complete_with(reports, iteration)
            kept = self._kept(generations, iteration, failure is not None)
            # Before any rank removes a file: an incomplete generation must not look complete.
            generations.remove_manifests(generations.mine - kept)
            outcome = failure, kept
        return self.comm.bcast_obj(outcome)  # type: ignore[no-any-return]

    def _kept(self, generations: Generations, iteration: int, has_failed: bool) -> frozenset[int]:
        """Return the iterations whose files are to be kept now; on rank 0 only."""
        if has_failed:
            return frozenset(generations.mine - {iteration})
        self._n_saves += 1
        if self._n_saves % self.gc_interval:
            return frozenset(generations.mine)
        generations.complete = set(sorted(generations.complete)[-self.cp_interval :])
        return frozenset(generations.complete)


def _agree(comm: CommunicatorBase, name: Any, cp_interval: Any, gc_interval: Any) -> None:
    """Raise on every rank unless the arguments are valid, and the same on all ranks; collective."""
    with raise_on_all(comm):
        _check_arguments(name, cp_interval, gc_interval)
    expect_same(comm, "name, cp_interval and gc_interval", (name, cp_interval, gc_interval))


def _check_arguments(name: Any, cp_interval: Any, gc_interval: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"expected a string for name, got {type(name).__name__}: {name!r:.80}")
    forbidden = {"\0", "/", os.sep, os.altsep or os.sep}
    if not name or forbidden.intersection(name):
        raise ValueError(f"expected a name without path separators, to be part of a file's name; got {name!r}")
    for number, argument in ((cp_interval, "cp_interval"), (gc_interval, "gc_interval")):
        if operator.index(number) < 1:
            raise ValueError(f"expected {argument} of at least 1, got {number}")
