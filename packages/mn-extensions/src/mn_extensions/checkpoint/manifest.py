"""The manifest of a generation: which files of which ranks belong together, with their sizes and checksums.

Rank 0 writes it after all ranks have written their files, so a generation without a manifest is incomplete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from mn_extensions.checkpoint.files import TEMPORARY, FileRecord, open_regular, write_file

_FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """A complete generation.

    Attributes:
        iteration: The number of completed iterations.
        files: The file of each rank, by rank.
    """

    iteration: int
    files: tuple[FileRecord, ...]


def file_name(run: str, rank: int, iteration: int) -> str:
    """Return the name of a rank's file."""
    return f"{run}.{rank}.{iteration}"


def manifest_name(run: str, iteration: int) -> str:
    """Return the name of a generation's manifest."""
    return f"{run}.manifest.{iteration}"


def iterations_of(names: Iterable[str], run: str, owner: str) -> list[int]:
    """Return the iterations of the files that belong to a run, in ascending order.

    Args:
        names: The names of files.
        run: The name of the run, which may itself have dots in it.
        owner: A rank in digits, or ``manifest``.

    Returns:
        The iterations of the files named ``<run>.<owner>.<iteration>``.
    """
    pattern = re.compile(re.escape(f"{run}.{owner}.") + r"(0|[1-9][0-9]*)")
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))


def temporaries_of(names: Iterable[str], run: str, owner: str) -> list[str]:
    """Return the names of files that were being written when their process died; arguments as above."""
    # Not digits alone: this would be a file of another run, whose name begins like that of a temporary file.
    pattern = re.compile(re.escape(f"{TEMPORARY}{run}.{owner}.") + r"[0-9]+\.(?![0-9]+$)[^.]+")
    return [name for name in names if pattern.fullmatch(name)]


def write_manifest(folder: Path, run: str, manifest: Manifest) -> None:
    """Write a manifest, which makes its generation complete.

    Raises:
        OSError: It cannot be written.
    """
    content = json.dumps({"format": _FORMAT, **asdict(manifest)})
    text = json.dumps({"content": content, "checksum": _checksum(content)})
    write_file(folder, manifest_name(run, manifest.iteration), lambda file: file.write(text.encode()))


def read_manifest(folder: Path, run: str, iteration: int) -> Manifest:
    """Read a manifest.

    Raises:
        ValueError: It is damaged, or was written by a later version.
        OSError: It is not a regular file, or cannot be read.
    """
    path = folder / manifest_name(run, iteration)
    with open_regular(path) as file:
        data = file.read()
    try:
        outer = json.loads(data)
        content = outer["content"]
        intact = outer["checksum"] == _checksum(content)
        fields = json.loads(content)
        files = tuple(FileRecord(**each) for each in fields["files"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is damaged: {error}") from error
    if not intact or fields["iteration"] != iteration:
        raise ValueError(f"{os.fspath(path)} is damaged: its checksum does not match")
    if fields["format"] != _FORMAT:
        raise ValueError(f"{os.fspath(path)}: expected format {_FORMAT}, got {fields['format']}")
    return Manifest(iteration, files)


def _checksum(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
