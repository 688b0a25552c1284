"""The checkpoints ("generations") of a run in a folder: which there are, and which this rank may remove or replace.

A file may have the name of a checkpoint, but not have been written here: it may be a checkpoint of the ChainerMN in
Chainer, which uses the same names, or anything else. Such a file may be read, but is never changed.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mn_comm import Change, CommunicatorBase, is_elastic, raise_on_all
from mn_extensions.checkpoint.arrays import State, is_marked, read_snapshot, write_arrays
from mn_extensions.checkpoint.files import FileRecord, open_regular, read_record, write_file
from mn_extensions.checkpoint.manifest import (
    Manifest,
    file_name,
    iterations_of,
    manifest_name,
    read_manifest,
    temporaries_of,
    write_manifest,
)

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """A generation, and this rank's state in it."""

    iteration: int
    state: State


class _Other(NamedTuple):
    """A file of another program that may be a checkpoint."""

    iteration: int
    run: str


class Generations:
    """The generations of a run, as one rank sees them.

    Args:
        comm: The ranks.
        folder: The folder for the files.
        run: The name of the run.

    Attributes:
        mine: The iterations of which this rank has a file; rank 0, or a manifest.
        complete: At rank 0, the iterations whose generations are complete.
    """

    def __init__(self, comm: CommunicatorBase, folder: Path, run: str) -> None:
        self.comm = comm
        self.folder = folder
        self.run = run
        self.mine: set[int] = set()
        self.complete: set[int] = set()
        # By iteration: under which number each of the current ranks has written its file; None for one that has none.
        self._writers: dict[int, list[int | None]] = {}
        # The iterations and numbers of files of which no rank takes care any more.
        self._orphans: set[tuple[int, int]] = set()
        self._lost: set[int] = set()  # the numbers of lost ranks
        self._recorded: dict[int, FileRecord] = {}  # the manifests' records of this rank's files

        if is_elastic(comm):
            comm.on_change(weakref.WeakMethod(self._renumber))  # type: ignore[attr-defined]

    def _renumber(self, change: Change) -> None:
        gone = (*change.lost, *change.set_aside)
        self._lost.update(gone)
        for iteration, writers in self._writers.items():
            numbers = [*writers, *[None] * change.old_size]  # spares that have joined since have none
            self._orphans |= {(iteration, number) for old in gone if (number := numbers[old]) is not None}
            writers[:] = [numbers[old] for old in change.survivors]

    def path(self, iteration: int) -> Path:
        """Return the path of this rank's file; it may have been written under another number before ranks were lost."""
        rank, writers = self.comm.rank, self._writers.get(iteration, [])
        number = writers[rank] if rank < len(writers) else None
        return self.folder / file_name(self.run, rank if number is None else number, iteration)

    def is_ours(self, iteration: int) -> bool:
        """Return whether this rank's file was written by a checkpointer of this package."""
        path = self.path(iteration)
        if not path.is_file():
            return False
        if is_marked(path):
            return True
        # A file that is damaged at its end has lost its mark, but a manifest names it. If there is an intact archive of
        # a different length, another program has replaced the file since.
        recorded = self._recorded.get(iteration)
        return recorded is not None and (path.stat().st_size == recorded.nbytes or not zipfile.is_zipfile(path))

    def expect_free(self, iteration: int) -> None:
        """Raise ``FileExistsError`` if saving would replace a file of another program."""
        if self.path(iteration).exists() and not self.is_ours(iteration):
            raise FileExistsError(
                f"expected no file of another program where a checkpoint is to be saved, got {self.path(iteration)}, "
                "which may be one of an older ChainerMN: move it away, or use another name for the run"
            )

    def write(self, state: State, iteration: int) -> FileRecord | str:
        """Write this rank's file, and return its record, or why it could not be written."""
        self.mine.add(iteration)
        # Those of removed files are needed until all ranks have removed them.
        self._writers = {each: numbers for each, numbers in self._writers.items() if each in self.mine}
        # If ranks were lost while it was saved, it is saved again, under the present numbers.
        self._orphans |= {(iteration, each) for each in self._writers.get(iteration, []) if each is not None}
        self._writers[iteration] = list(range(self.comm.size))
        self._orphans -= {(iteration, each) for each in self._writers[iteration]}
        path = self.path(iteration)
        try:
            return write_file(self.folder, path.name, lambda file: write_arrays(file, state))
        except OSError as error:
            return f"rank {self.comm.rank} cannot write {path}: {error}"

    def complete_with(self, reports: Sequence[FileRecord | str], iteration: int) -> str | None:
        """Write the manifest, at rank 0, if every rank has written its file; return why it is not written, or ``None``.

        Args:
            reports: What :meth:`write` has returned on each rank.
            iteration: The generation.
        """
        self.complete.discard(iteration)
        files = tuple(report for report in reports if isinstance(report, FileRecord))
        if len(files) < len(reports):
            return next(report for report in reports if isinstance(report, str))
        try:
            write_manifest(self.folder, self.run, Manifest(iteration, files))
        except OSError as error:
            return f"rank 0 cannot write {self.folder / manifest_name(self.run, iteration)}: {error}"
        self.complete.add(iteration)
        return None

    def remove(self, iterations: set[int]) -> None:
        """Remove this rank's files, and at rank 0 the manifests and the files of lost ranks, of some generations."""
        if self.comm.rank == 0:
            self.remove_manifests(iterations)
        for iteration in iterations:
            with _in_nobodys_way(self.path(iteration)):
                if self.is_ours(iteration):
                    self.path(iteration).unlink()
        self.mine -= iterations
        # Some may be of an earlier removal, which their ranks did not live to see.
        left = {(iteration, number) for iteration, number in self._orphans if iteration not in self.mine}
        for path in [self.folder / file_name(self.run, number, iteration) for iteration, number in left]:
            with _in_nobodys_way(path):
                if self.comm.rank == 0 and path.is_file() and is_marked(path):
                    path.unlink()
        self._orphans -= left

    def clear(self) -> None:
        """Remove all files, and at rank 0 those that a lost rank was writing; when no rank writes any more."""
        self.remove(set(self.mine))
        if self.comm.rank == 0:
            names: list[str] = []
            with _in_nobodys_way(self.folder):
                names = os.listdir(self.folder) if self._lost else []
            for name in [name for number in self._lost for name in temporaries_of(names, self.run, str(number))]:
                with _in_nobodys_way(self.folder / name):
                    (self.folder / name).unlink()

    def remove_manifests(self, iterations: set[int]) -> None:
        """Remove the manifests of some generations."""
        for path in (self.folder / manifest_name(self.run, iteration) for iteration in iterations):
            with _in_nobodys_way(path):
                path.unlink()

    def newest_unharmed(self, old_run: str) -> Found | None:
        """Return the newest generation that every rank can read; collective.

        Args:
            old_run: Another name under which an older ChainerMN may have saved the run.

        Raises:
            ValueError: It was saved by a different number of ranks.
        """
        with raise_on_all(self.comm):
            read = self._read_manifests() if self.comm.rank == 0 else None
        manifests = self.comm.bcast_obj(read)
        with raise_on_all(self.comm):
            others = self._look_around(manifests, old_run)
        others_everywhere = self.comm.allgather_obj(others)
        found = self._first_unharmed(manifests, set.intersection(*others_everywhere))
        self._warn_of_what_is_in_the_way(others_everywhere, -1 if found is None else found.iteration)
        return found

    def _read_manifests(self) -> dict[int, Manifest | str]:
        """Return all manifests by iteration; in place of an unreadable one, the reason why it cannot be read."""
        found: dict[int, Manifest | str] = {}
        for iteration in iterations_of(os.listdir(self.folder), self.run, "manifest"):
            try:
                found[iteration] = read_manifest(self.folder, self.run, iteration)
            except (OSError, ValueError) as error:
                found[iteration] = str(error)
        return found

    def _look_around(self, manifests: dict[int, Manifest | str], old_run: str) -> set[_Other]:
        """Find out which files this rank has, and remove incomplete files of an earlier training.

        Returns:
            Those of another program.
        """
        rank = self.comm.rank
        for iteration, manifest in manifests.items():
            if isinstance(manifest, Manifest) and rank < len(manifest.files):
                self._recorded[iteration] = manifest.files[rank]
        names = [entry.name for entry in os.scandir(self.folder) if entry.is_file()]
        for owner in [str(rank), "manifest"] if rank == 0 else [str(rank)]:
            for name in temporaries_of(names, self.run, owner):
                (self.folder / name).unlink(missing_ok=True)
        iterations = set(iterations_of(names, self.run, str(rank)))
        others = {each for each in iterations if not self.is_ours(each)}
        self.mine |= iterations - others
        self._writers.update({each: list(range(self.comm.size)) for each in iterations - others})
        if rank == 0:
            self.mine |= set(manifests)
        old = {_Other(each, old_run) for each in iterations_of(names, old_run, str(rank)) if old_run != self.run}
        old = {each for each in old if not is_marked(self.folder / file_name(old_run, rank, each.iteration))}
        return old | {_Other(each, self.run) for each in others}

    def _first_unharmed(self, manifests: dict[int, Manifest | str], common: set[_Other]) -> Found | None:
        """Return the newest generation, with a manifest or without, that every rank can read; collective."""
        candidates = [(iteration, True, self.run) for iteration in manifests]
        candidates += [(iteration, False, run) for iteration, run in common]
        for iteration, has_manifest, run in sorted(candidates, reverse=True):
            path = self.folder / file_name(run, self.comm.rank, iteration)
            with raise_on_all(self.comm):
                own = self._read_recorded(manifests[iteration]) if has_manifest else read_snapshot(path)
            problem = own if isinstance(own, str) else None
            problems = [each for each in self.comm.allgather_obj(problem) if each is not None]
            if not isinstance(own, str) and not problems:
                unharmed = {each for each, manifest in manifests.items() if isinstance(manifest, Manifest)}
                self.complete = {each for each in unharmed if each < iteration or (has_manifest and each == iteration)}
                return Found(iteration, own)
            self._warn(f"{'; '.join(dict.fromkeys(problems))}: trying the previous checkpoint")
        if self.mine and self.comm.rank == 0 and not candidates:
            logger.warning("found checkpoints of %s in %s, but no manifest: not used", self.run, self.folder)
        return None

    def _read_recorded(self, manifest: Manifest | str) -> State | str:
        """Return this rank's state in a generation that has a manifest, or the problem with it."""
        if isinstance(manifest, str):
            return manifest
        if len(manifest.files) != self.comm.size:
            raise ValueError(
                f"expected a checkpoint of {self.comm.size} ranks, got one of {len(manifest.files)}: "
                f"{self.folder / manifest_name(self.run, manifest.iteration)}; start {len(manifest.files)} ranks, "
                "or use multi_node_snapshot, which loads into any number of them"
            )
        return self._problem_of(manifest.files[self.comm.rank]) or read_snapshot(self.path(manifest.iteration))

    def _problem_of(self, expected: FileRecord) -> str | None:
        """Return the problem with this rank's file, if there is one."""
        path = self.folder / expected.name
        try:
            with open_regular(path) as file:
                nbytes = os.fstat(file.fileno()).st_size  # so that a very large file is not read
            found = read_record(self.folder, expected.name) if nbytes == expected.nbytes else None
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        if found is None:
            return f"{path} has {nbytes} bytes instead of {expected.nbytes}"
        return None if found == expected else f"{path} is damaged: its checksum does not match"

    def _warn_of_what_is_in_the_way(self, others_everywhere: Sequence[set[_Other]], resumed: int) -> None:
        names = [
            file_name(run, rank, iteration)
            for rank, others in enumerate(others_everywhere)
            for iteration, run in sorted(others)
            if iteration > resumed and run == self.run
        ]
        if names:
            self._warn(
                f"files of another program, such as an older ChainerMN, are in {self.folder}, and not all ranks can "
                f"load them: {', '.join(names[:4])}{', …' * (len(names) > 4)}; they are never replaced, so saving "
                "under these names will be an error: move them away, or use another name for the run"
            )

    def _warn(self, message: str) -> None:
        with raise_on_all(self.comm):  # if warnings are errors, all ranks raise
            if self.comm.rank == 0:
                warnings.warn(message, RuntimeWarning, stacklevel=7)


@contextmanager
def _in_nobodys_way(path: Path) -> Iterator[None]:
    """Continue if a file cannot be removed."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)
