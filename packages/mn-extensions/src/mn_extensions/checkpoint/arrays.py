"""Chainer's snapshot files, written as Chainer writes them and read without unpickling anything.

A snapshot is an .npz file. Chainer stores ``None`` (for an uninitialised parameter) as an array of shape ``()`` that
contains a Python object, so its own loader has to allow pickles, and with them any code in the file. Here, the opcodes
of the pickle are read but never executed: only the pickle of ``None`` is accepted.
"""

from __future__ import annotations

import math
import os
import pickletools
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from mn_extensions.checkpoint.files import open_regular

State = dict[str, "np.ndarray[Any, Any]"]
"""Arrays by name, as ``chainer.serializers.npz.serialize`` returns them."""

_SUFFIX = ".npy"
# The comment of the archive. It is at the very end of the file, and identifies files that this module has written.
_MARK = b"chainermn checkpoint"
# The only names that the pickle of an array with just None in it may contain, for any protocol, Python and NumPy, and
# its end.
_NAMES = {"numpy", "ndarray", "dtype", "numpy.core.multiarray", "numpy._core.multiarray", "_reconstruct"}
_NAMES |= {"_codecs", "encode", "latin1", "b", "O", "O8", "|"}
_END = ["EMPTY_LIST", "NONE", "APPEND", "TUPLE", "BUILD", "STOP"]
_BOOKKEEPING = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}
_MOST_BYTES_OF_NONE = 1000


def write_arrays(file: Any, arrays: State) -> None:
    """Write arrays as an uncompressed .npz file; the same arrays always give the same bytes.

    Args:
        file: An object with ``write`` and ``flush``.
        arrays: The arrays.

    Raises:
        TypeError: An array holds Python objects other than ``None``.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject and not is_none(array):
            raise TypeError(f"expected arrays without Python objects in a snapshot, got dtype {array.dtype} in {name}")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.comment = _MARK
        for name, array in arrays.items():
            # ZipInfo's default date is always the same.
            with archive.open(zipfile.ZipInfo(name + _SUFFIX), "w", force_zip64=True) as member:
                npy.write_array(member, array, allow_pickle=True)


def read_arrays(file: Any) -> State:
    """Read an .npz file without unpickling anything.

    Args:
        file: A path, or a file opened for reading bytes.

    Returns:
        The arrays by name; ``None`` is in an array of shape ``()``, as Chainer's deserializer expects.

    Raises:
        ValueError: An array holds Python objects other than one ``None``, or the file is not an intact .npz file.
        OSError: The file cannot be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return {name.removesuffix(_SUFFIX): _read_member(archive, name) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last one if a bit says "encrypted"
        raise ValueError(f"expected an .npz file, got {getattr(file, 'name', file)}: {error}") from error


def read_snapshot(path: Path) -> State | str:
    """Return the arrays in a file by name, or why it cannot be read."""
    try:
        with open_regular(path) as file:
            return read_arrays(file)
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}"


def is_marked(path: Path) -> bool:
    """Return whether the end of a file shows that it was written by :func:`write_arrays`.

    Raises:
        OSError: It does not exist, is not a regular file, or cannot be read.
    """
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_MARK)))
        return file.read() == _MARK


def is_none(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array is what Chainer saves for ``None``."""
    return bool(array.dtype.hasobject) and array.shape == () and array.item() is None


def _read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray[Any, Any]:
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others have exceptions of their own
        raise ValueError(f"expected no compression, or that of NumPy, got number {info.compress_type} for {name}")
    with archive.open(name) as member:
        shape, dtype = _read_header(member)
        header_bytes = member.tell()
        if dtype.hasobject:
            if shape == () and _is_pickled_none(member.read(_MOST_BYTES_OF_NONE)):
                return np.asarray(None)
            raise ValueError(f"expected arrays without Python objects, got dtype {dtype} and shape {shape} in {name}")
    # A damaged header may ask for more memory than there is. (For Python, a bool is an integer.)
    expected, held = math.prod(map(int, shape)) * dtype.itemsize, info.file_size - header_bytes
    if expected != held or bool in map(type, shape):
        raise ValueError(f"expected {expected} bytes for shape {shape} and dtype {dtype} in {name}, got {held}")
    with archive.open(name) as member:
        array = np.asarray(npy.read_array(member, allow_pickle=False))
        member.read(1)  # the checksum of a member is compared only at its end
    return array


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(member)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(member)
    return shape, dtype


def _is_pickled_none(pickled: bytes) -> bool:
    """Return whether a pickle is that of an array that contains ``None``, without executing it."""
    try:
        opcodes = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(pickled)]
    except (ValueError, IndexError, UnicodeDecodeError):
        return False
    texts = [each.decode("latin1") if isinstance(each, bytes) else each for _, each in opcodes]
    names = {word for text in texts if isinstance(text, str) for word in text.split(" ")}
    return names <= _NAMES and [name for name, _ in opcodes if name not in _BOOKKEEPING][-len(_END) :] == _END
