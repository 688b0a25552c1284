"""Files that get their name only when all of their bytes are on the disk."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

TEMPORARY = "tmp-"
_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """The properties that a file must have to count as intact.

    Attributes:
        name: Its name within its folder.
        nbytes: Its length in bytes.
        checksum: Its BLAKE2b hash (RFC 7693) of 16 bytes, in hexadecimal digits.
    """

    name: str
    nbytes: int
    checksum: str


class HashingWriter:
    """A file that is written from beginning to end, and that computes the hash of its contents.

    Args:
        file: An open file; the caller closes it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = _new_hash()
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``, and return its length in bytes."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._file.write(view)
        self.nbytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: the caller flushes the file."""

    @property
    def checksum(self) -> str:
        """The hash of everything written so far."""
        return self._hash.hexdigest()


def write_file(folder: Path, name: str, fill: Callable[[HashingWriter], object]) -> FileRecord:
    """Write a file under a temporary name, and rename it only when it is complete and on the disk.

    Args:
        folder: The folder, which must exist.
        name: The name of the file; an existing file is replaced.
        fill: Writes the content.

    Returns:
        The properties of the written file.

    Raises:
        OSError: The file cannot be written; then no part of it remains, and an existing file is not changed.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f"{TEMPORARY}{name}.", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            writer = HashingWriter(file)
            fill(writer)
            file.flush()
            os.fsync(file)
        os.replace(temporary, folder / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(folder)
    return FileRecord(name, writer.nbytes, writer.checksum)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk: after a power failure, a rename is lost unless its folder was synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading bytes, unless it is a pipe or a device, which might be read without end.

    Raises:
        OSError: It does not exist, is not a regular file, or cannot be read.
    """
    # Opening a device may do something to it. A pipe may take the place of a file that was just found.
    _expect_regular(os.stat(path), path)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    try:
        _expect_regular(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def _expect_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read_record(folder: Path, name: str) -> FileRecord:
    """Return the current properties of a file.

    Raises:
        OSError: It does not exist, is not a regular file, or cannot be read.
    """
    hashed = _new_hash()
    nbytes = 0
    with open_regular(folder / name) as file:
        while data := file.read(_READ_BYTES):
            hashed.update(data)
            nbytes += len(data)
    return FileRecord(name, nbytes, hashed.hexdigest())


def check_writable(folder: Path) -> None:
    """Create the folder if necessary, and raise ``OSError`` if files cannot be created in it."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.NamedTemporaryFile(prefix=TEMPORARY, dir=folder).close()


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)
