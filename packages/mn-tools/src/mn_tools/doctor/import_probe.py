"""Imports the package that its argument names, and writes the result; runs in its own process."""

from __future__ import annotations

import importlib
import sys

from mn_tools.doctor.records import emit, in_short

__all__: list[str] = []


def main(name: str) -> None:
    """Import a package and write its version, or what went wrong."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        emit(missing=error.name == name, error=in_short(error))
    except Exception as error:
        emit(error=in_short(error))
    else:
        emit(version=str(getattr(module, "__version__", "0")), file=str(module.__file__))


if __name__ == "__main__":
    main(sys.argv[1])
