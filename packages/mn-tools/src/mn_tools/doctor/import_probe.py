"""Imports the package that its argument names, and writes the result; runs in its own process."""

from __future__ import annotations

import importlib
import sys

from mn_tools.doctor.commands import emit, errors_as


def main(name: str) -> None:
    """Import a package and write its version, or what went wrong."""
    with errors_as("error"):
        module = importlib.import_module(name)
        emit(version=str(getattr(module, "__version__", "0")), file=str(module.__file__))


if __name__ == "__main__":
    main(sys.argv[1])
