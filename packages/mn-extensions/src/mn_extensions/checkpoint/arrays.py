"""Chainer's snapshot files, written as ever and read without unpickling anything.

A snapshot is an .npz file. Chainer stores ``None`` (a parameter that is still to be initialised) as an array of shape
``()`` with a Python object in it, so its own loader has to allow pickles, and with them any code that somebody put
into the file. No other object can be in a snapshot that was written here, so on reading such an array is ``None``.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

__all__ = ["read_arrays", "write_arrays"]

_Arrays = Mapping[str, "np.ndarray[Any, Any]"]
_SUFFIX = ".npy"


def write_arrays(file: Any, arrays: _Arrays) -> None:
    """Write arrays as an uncompressed .npz file; the same arrays make the same bytes.

    Args:
        file: An object with ``write`` and ``flush``.
        arrays: The arrays by name, as ``chainer.serializers.npz.serialize`` returns them.

    Raises:
        TypeError: One holds Python objects other than ``None``.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject and not _is_none(array):
            raise TypeError(f"expected arrays without Python objects in a snapshot, got dtype {array.dtype} in {name}")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            # ZipInfo's own date is always the same one.
            with archive.open(zipfile.ZipInfo(name + _SUFFIX), "w", force_zip64=True) as member:
                npy.write_array(member, array, allow_pickle=True)


def read_arrays(file: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Read an .npz file without unpickling anything.

    Args:
        file: A path, or a file opened for reading bytes.

    Returns:
        The arrays by name; an array of shape ``()`` that holds a Python object is read as ``None`` in such an array,
        for which Chainer's deserializer looks.

    Raises:
        ValueError: An array of another shape holds Python objects, or the file is not an .npz file.
        OSError: The file cannot be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return {name.removesuffix(_SUFFIX): _read_member(archive, name) for name in archive.namelist()}
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"expected an .npz file, got {file}: {error}") from error


def _read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray[Any, Any]:
    with archive.open(name) as member:
        shape, dtype = _read_header(member)
    if not dtype.hasobject:
        with archive.open(name) as member:
            return np.asarray(npy.read_array(member, allow_pickle=False))
    if shape != ():
        raise ValueError(f"expected arrays without Python objects, got dtype {dtype} and shape {shape} in {name}")
    return np.asarray(None)


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(member)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(member)
    return shape, dtype


def _is_none(array: np.ndarray[Any, Any]) -> bool:
    return array.shape == () and array.item() is None
