"""The checkpointer: an extension that saves all ranks' states together, and takes up the newest unharmed ones again."""

from __future__ import annotations

import logging
import operator
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from chainer.training import Extension

from mn_comm import CommunicatorBase, expect_same, raise_on_all
from mn_extensions.checkpoint.arrays import read_arrays, write_arrays
from mn_extensions.checkpoint.ending import Ending
from mn_extensions.checkpoint.files import FileRecord, check_writable, read_record, write_file
from mn_extensions.checkpoint.manifest import (
    Manifest,
    file_name,
    iterations_of,
    manifest_name,
    read_manifest,
    temporaries_of,
    write_manifest,
)
from mn_extensions.checkpoint.replicas import assume_synchronized
from mn_extensions.checkpoint.state import check_fits, load_state, state_of

__all__ = ["MultiNodeCheckpointer", "create_multi_node_checkpointer"]

logger = logging.getLogger(__name__)


def create_multi_node_checkpointer(
    name: str,
    comm: CommunicatorBase,
    cp_interval: int = 5,
    gc_interval: int = 5,
    path: str | os.PathLike[str] | None = None,
) -> MultiNodeCheckpointer:
    """Create an extension that saves the states of all ranks, and lets a training that died go on; collective.

    Each rank writes ``<name>.<rank>.<iteration>``. When all have, rank 0 writes ``<name>.manifest.<iteration>`` with
    the checksums of these files: only then does the generation exist. Call ``maybe_load`` after all extensions were
    added to the trainer and before ``trainer.run()``. When training ends without an error, the files are removed; when
    it ends by one, they stay.

    Besides the trainer's state, that of NumPy's global random numbers is saved and restored, so that the training goes
    on with the batches and dropout masks it would have had. CuPy's random numbers are not.

    Args:
        name: The name of the run, the same on every rank; dots are allowed, path separators are not.
        comm: The ranks that train together.
        cp_interval: How many generations to keep.
        gc_interval: After how many saves to remove older ones.
        path: The folder for the files, on a disk of each node's own or on one for all; by default the trainer's
            ``out``.

    Returns:
        The extension.

    Raises:
        TypeError: An argument is of the wrong type (on every rank).
        ValueError: ``name`` cannot be part of a file's name, an interval is below 1, or the ranks' arguments differ
            (on every rank).
        OSError: ``path`` is given and cannot be written on some rank (on every rank).
    """
    return MultiNodeCheckpointer(name, comm, cp_interval, gc_interval, path)


class MultiNodeCheckpointer(Extension):  # type: ignore[misc]  # Chainer has no types
    """See :func:`mn_extensions.create_multi_node_checkpointer`."""

    # After all others, so that what they keep is in the checkpoint; as Chainer's own snapshot.
    priority = -100

    def __init__(
        self,
        name: str,
        comm: CommunicatorBase,
        cp_interval: int,
        gc_interval: int,
        path: str | os.PathLike[str] | None,
    ) -> None:
        with raise_on_all(comm):
            _check_arguments(name, cp_interval, gc_interval)
        expect_same(comm, "name, cp_interval and gc_interval", (name, cp_interval, gc_interval))
        self.name = name  # the trainer may rename the extension, but not the files
        self.comm = comm
        self.cp_interval = cp_interval
        self.gc_interval = gc_interval
        self.path = None if path is None else os.fspath(path)
        self._run = name
        self._timings: list[float] = []
        self._mine: set[int] = set()  # the iterations of which this rank may have a file; rank 0, or a manifest
        self._complete: set[int] = set()  # at rank 0, the iterations whose generations exist as a whole
        self._is_folder_checked = False
        self._has_failed = False
        self._n_saves = 0
        self._ending: Ending | None = None
        if self.path is not None:
            self._check_folder()

    def __call__(self, trainer: Any) -> None:
        """Save the trainer; collective."""
        self._use_folder(trainer)
        self.save(trainer, trainer.updater.iteration)

    def save(self, target: Any, iteration: int) -> None:
        """Save the states of all ranks; collective.

        If a rank cannot write its file (its disk is full), all ranks warn and go on; older generations are untouched.

        Args:
            target: What to save: a trainer, or anything else that Chainer can serialize.
            iteration: The number under which to save it, the same on every rank.

        Raises:
            RuntimeError: There is no folder yet: neither was ``path`` given, nor the trainer saved or loaded.
            TypeError: The state on some rank holds Python objects (on every rank).
            OSError: This is the first save, and the folder cannot be written on some rank (on every rank).
        """
        begin = time.monotonic()
        self._check_folder()
        self._expect_ending()
        self._mine.add(iteration)
        with raise_on_all(self.comm):
            report = self._write(state_of(target), iteration)
        outcome = self._complete_generation(iteration, self.comm.allgather_obj(report))
        self._remove(self._mine - outcome.kept)
        if outcome.failure is not None:
            with raise_on_all(self.comm):  # where warnings are errors, all ranks raise
                warnings.warn(
                    f"the checkpoint of iteration {iteration} was not saved: {outcome.failure}; the training goes on",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._timings.append(time.monotonic() - begin)

    def maybe_load(self, trainer: Any, optimizer: Any = None, path: str | os.PathLike[str] | None = None) -> int | None:
        """Load the newest generation that is unharmed on every rank, if there is one; collective.

        Files whose checksums do not fit are reported, by a warning on rank 0, and the next older generation is
        tried; nothing is loaded before its checksum was found right on every rank.

        Args:
            trainer: The trainer, or whatever else was saved.
            optimizer: A multi-node optimizer whose next update takes a step, rather than share out the parameters of
                rank 0, if all ranks have loaded the same parameters; by default those of ``trainer``.
            path: The folder to use if none was given before; by default the trainer's ``out``.

        Returns:
            The iteration that was loaded, or ``None`` if there is no generation.

        Raises:
            ValueError: The generation is one of another number of ranks, or of another model (on every rank); then
                nothing was loaded. To go on with another number of ranks, use
                :func:`mn_extensions.multi_node_snapshot`.
            OSError: The folder cannot be written on some rank (on every rank).
        """
        self._use_folder(trainer, path)
        self._check_folder()
        self._expect_ending()
        with raise_on_all(self.comm):
            self._look_around()
        newest = self._newest_unharmed()
        if newest is None:
            return None
        with raise_on_all(self.comm):
            state = read_arrays(self._folder / file_name(self._run, self.comm.rank, newest.iteration))
            check_fits(state, trainer)
        with raise_on_all(self.comm):
            load_state(state, trainer)
        assume_synchronized(trainer, optimizer)
        logger.info("resumed %s at iteration %d", self._run, newest.iteration)
        return newest.iteration

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        """Remember that the training died, so that ``finalize`` keeps the files."""
        self._has_failed = True

    def finalize(self) -> None:
        """Remove the files, if the training ended well on every rank; collective unless it did not on this one.

        Called by the trainer, also when it ends by an exception; calling it again does nothing.
        """
        # on_error is not called for a KeyboardInterrupt, but finalize is, while that is on its way.
        has_failed = self._has_failed or sys.exc_info()[0] is not None
        if self._ending is not None and self._ending.is_well_on_all_ranks(not has_failed) and self.path is not None:
            self._remove(set(self._mine))

    def _expect_ending(self) -> None:
        """Be ready for the end of the training; collective the first time."""
        if self._ending is None:  # not earlier: there may be thousands that never save
            self._ending = Ending(self.comm.mpi_comm)

    def get_stats(self) -> str:
        """Return how long saving took, as text: the mean, the shortest and the longest time in seconds."""
        if not self._timings:
            return "nothing was saved yet"
        mean = sum(self._timings) / len(self._timings)
        return (
            f"{len(self._timings)} checkpoints saved, seconds for each: mean {mean:f}, min {min(self._timings):f}, "
            f"max {max(self._timings):f}"
        )

    @property
    def _folder(self) -> Path:
        if self.path is None:
            raise RuntimeError("expected a folder for the checkpoints: pass path to create_multi_node_checkpointer")
        return Path(self.path)

    def _use_folder(self, trainer: Any, path: str | os.PathLike[str] | None = None) -> None:
        if self.path is None and (path is not None or hasattr(trainer, "out")):
            self.path = os.fspath(trainer.out if path is None else path)

    def _check_folder(self) -> None:
        if not self._is_folder_checked:
            with raise_on_all(self.comm):
                check_writable(self._folder)
            self._is_folder_checked = True

    def _look_around(self) -> None:
        """Find out which files of the run this rank has, and remove what was being written when the last one died."""
        rank = str(self.comm.rank)
        owners = [rank, "manifest"] if self.comm.rank == 0 else [rank]
        names = os.listdir(self._folder)
        for owner in owners:
            self._mine.update(iterations_of(names, self._run, owner))
            for name in temporaries_of(names, self._run, owner):
                (self._folder / name).unlink(missing_ok=True)

    def _write(self, state: Mapping[str, np.ndarray[Any, Any]], iteration: int) -> FileRecord | str:
        """Write this rank's file, and return its record, or why it could not be written."""
        name = file_name(self._run, self.comm.rank, iteration)
        try:
            return write_file(self._folder, name, lambda file: write_arrays(file, state))
        except OSError as error:
            return f"rank {self.comm.rank} cannot write {self._folder / name}: {error}"

    def _complete_generation(self, iteration: int, reports: Sequence[FileRecord | str]) -> _Outcome:
        """Let rank 0 write the manifest, if every rank has written its file; collective."""
        outcome = None
        if self.comm.rank == 0:
            files = tuple(report for report in reports if isinstance(report, FileRecord))
            failures = [report for report in reports if isinstance(report, str)]
            failure = failures[0] if failures else self._write_manifest(Manifest(iteration, files))
            (self._complete.add if failure is None else self._complete.discard)(iteration)
            outcome = _Outcome(failure, self._kept(iteration, failure is not None))
            # Before any rank removes a file: an incomplete generation must not look complete.
            self._remove_manifests(self._mine - outcome.kept)
        return self.comm.bcast_obj(outcome)  # type: ignore[no-any-return]

    def _write_manifest(self, manifest: Manifest) -> str | None:
        try:
            write_manifest(self._folder, self._run, manifest)
        except OSError as error:
            return f"rank 0 cannot write {self._folder / manifest_name(self._run, manifest.iteration)}: {error}"
        return None

    def _kept(self, iteration: int, has_failed: bool) -> frozenset[int]:
        """Return the iterations whose files are to be kept now; at rank 0 only."""
        if has_failed:
            return frozenset(self._mine - {iteration})
        self._n_saves += 1
        if self._n_saves % self.gc_interval:
            return frozenset(self._mine)
        self._complete = set(sorted(self._complete)[-self.cp_interval :])
        return frozenset(self._complete)

    def _newest_unharmed(self) -> Manifest | None:
        """Return the newest generation whose files are all as its manifest says; collective."""
        manifests = self.comm.bcast_obj(self._read_manifests() if self.comm.rank == 0 else None)
        for manifest in manifests:
            if not isinstance(manifest, str):
                self._check_size(manifest)
            own = manifest if isinstance(manifest, str) else self._problem_of(manifest)
            problems = [problem for problem in self.comm.allgather_obj(own) if problem is not None]
            if not problems:
                self._complete = {other.iteration for other in manifests if isinstance(other, Manifest)}
                self._complete = {iteration for iteration in self._complete if iteration <= manifest.iteration}
                return manifest  # type: ignore[no-any-return]
            self._warn(f"{'; '.join(dict.fromkeys(problems))}: trying the generation before it")
        if self._mine and self.comm.rank == 0 and not manifests:
            logger.warning("found checkpoints of %s in %s, but no manifest: not used", self._run, self.path)
        return None

    def _read_manifests(self) -> list[Manifest | str]:
        """Return all manifests, newest first; instead of one that cannot be read, why not."""
        found: list[Manifest | str] = []
        for iteration in reversed(iterations_of(os.listdir(self._folder), self._run, "manifest")):
            try:
                found.append(read_manifest(self._folder, self._run, iteration))
            except (OSError, ValueError) as error:
                found.append(str(error))
        return found

    def _check_size(self, manifest: Manifest) -> None:
        if len(manifest.files) != self.comm.size:
            raise ValueError(
                f"expected a checkpoint of {self.comm.size} ranks, got one of {len(manifest.files)}: "
                f"{self._folder / manifest_name(self._run, manifest.iteration)}; start {len(manifest.files)} ranks, "
                "or use multi_node_snapshot, which loads into any number of them"
            )

    def _problem_of(self, manifest: Manifest) -> str | None:
        """Return what is wrong with this rank's file of a generation, if anything is."""
        expected = manifest.files[self.comm.rank]
        path = self._folder / expected.name
        try:
            found = read_record(self._folder, expected.name)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        if found.nbytes != expected.nbytes:
            return f"{path} has {found.nbytes} bytes instead of {expected.nbytes}"
        return None if found == expected else f"{path} is damaged: its checksum does not fit"

    def _warn(self, message: str) -> None:
        with raise_on_all(self.comm):  # where warnings are errors, all ranks raise
            if self.comm.rank == 0:
                warnings.warn(message, RuntimeWarning, stacklevel=5)

    def _remove(self, iterations: set[int]) -> None:
        """Remove this rank's files, and at rank 0 the manifests, of some generations."""
        if self.comm.rank == 0:
            self._remove_manifests(iterations)
        for iteration in iterations:
            _unlink(self._folder / file_name(self._run, self.comm.rank, iteration))
        self._mine -= iterations

    def _remove_manifests(self, iterations: set[int]) -> None:
        for iteration in iterations:
            _unlink(self._folder / manifest_name(self._run, iteration))


class _Outcome(NamedTuple):
    """What became of a generation: why it is incomplete, if it is, and of which iterations to keep the files."""

    failure: str | None
    kept: frozenset[int]


def _check_arguments(name: Any, cp_interval: Any, gc_interval: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"expected a string for name, got {type(name).__name__}: {name!r:.80}")
    forbidden = {"\0", "/", os.sep, os.altsep or os.sep}
    if not name or forbidden.intersection(name):
        raise ValueError(f"expected a name without path separators, to be part of a file's name; got {name!r}")
    for number, argument in ((cp_interval, "cp_interval"), (gc_interval, "gc_interval")):
        if operator.index(number) < 1:
            raise ValueError(f"expected {argument} of at least 1, got {number}")


def _unlink(path: Path) -> None:
    """Remove a file that is in nobody's way if it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)
