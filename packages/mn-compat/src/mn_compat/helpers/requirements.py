"""The two names of setuptools' ``pkg_resources`` that Chainer's test helpers use."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement


class ResolutionError(Exception):
    """A requirement is not met by what is installed."""


class WorkingSet:
    """The installed distributions."""

    def require(self, *requirements: str) -> None:
        """Check requirements such as ``numpy>=1.26``; one whose marker excludes this environment is met.

        Raises:
            ResolutionError: One is not installed, or at another version.
        """
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate():
                self._require(requirement)

    @staticmethod
    def _require(requirement: Requirement) -> None:
        try:
            installed = version(requirement.name)
        except PackageNotFoundError as error:
            raise ResolutionError(f"expecting {requirement}, got nothing") from error
        # An installed pre-release counts, as it did with pkg_resources.
        if not requirement.specifier.contains(installed, prereleases=True):
            raise ResolutionError(f"expecting {requirement}, got {installed}")
