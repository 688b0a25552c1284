"""A small substitute for setuptools' ``pkg_resources``: the parts that Chainer's test helpers and old packages use."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import BinaryIO

from packaging.requirements import Requirement
from packaging.version import Version

__all__ = [
    "DistributionNotFound",
    "ResolutionError",
    "VersionConflict",
    "WorkingSet",
    "get_distribution",
    "iter_entry_points",
    "parse_version",
    "require",
    "resource_exists",
    "resource_filename",
    "resource_stream",
    "resource_string",
    "working_set",
]


class ResolutionError(Exception):
    """The installed packages do not meet a requirement."""


class DistributionNotFound(ResolutionError):
    """A required package is not installed."""


class VersionConflict(ResolutionError):
    """A required package is installed in a different version."""


def get_distribution(requirement: str) -> Distribution:
    """Return an installed distribution; its ``version`` is a string.

    Raises:
        DistributionNotFound: It is not installed.
        VersionConflict: It is installed in a different version.
    """
    wanted = Requirement(requirement)
    try:
        found = distribution(wanted.name)
        installed = found.version
    except (PackageNotFoundError, FileNotFoundError) as error:  # the latter since Python 3.15, if there are no metadata
        raise DistributionNotFound(f"expecting {wanted}, got nothing") from error
    # An installed pre-release counts, as with pkg_resources.
    if not wanted.specifier.contains(installed, prereleases=True):
        raise VersionConflict(f"expecting {wanted}, got {installed}")
    return found


class WorkingSet:
    """The installed distributions."""

    def require(self, *requirements: str) -> list[Distribution]:
        """Return the distributions that meet requirements such as ``numpy>=1.26``.

        A requirement whose marker excludes this environment is met without a distribution.

        Raises:
            ResolutionError: A package is not installed, or is installed in a different version.
        """
        wanted = {text: Requirement(text).marker for text in requirements}
        return [get_distribution(text) for text, marker in wanted.items() if marker is None or marker.evaluate()]


working_set = WorkingSet()
require = working_set.require
parse_version = Version


def iter_entry_points(group: str, name: str | None = None) -> Iterator[EntryPoint]:
    """Return the entry points of a group, or only those with a certain name."""
    return iter(entry_points(group=group) if name is None else entry_points(group=group, name=name))


def resource_filename(package: str, path: str) -> str:
    """Return the path of a file beside a package's code; it need not exist.

    Raises:
        ImportError: There is no such package, or it has no folder.
    """
    module = importlib.import_module(package)
    folder = next(iter(getattr(module, "__path__", ())), os.path.dirname(getattr(module, "__file__", None) or ""))
    if not folder:
        raise ImportError(f"expecting {package} to be in a folder, which it is not", name=package)
    return os.path.join(folder, *path.split("/"))


def resource_exists(package: str, path: str) -> bool:
    """Return whether there is a file, or a folder, of this name beside a package's code."""
    return os.path.exists(resource_filename(package, path))


def resource_stream(package: str, path: str) -> BinaryIO:
    """Open a file beside a package's code for reading."""
    return open(resource_filename(package, path), "rb")


def resource_string(package: str, path: str) -> bytes:
    """Return the contents of a file beside a package's code."""
    with resource_stream(package, path) as file:
        return file.read()
