"""The files that define the layout of the workspace."""

import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the working tree."""
    return ROOT


@pytest.fixture(scope="session")
def workspace() -> dict[str, Any]:
    """The root's pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def packages() -> dict[str, dict[str, Any]]:
    """Each package's pyproject.toml, by the name of its folder."""
    files = sorted(ROOT.glob("packages/*/pyproject.toml"))
    return {file.parent.name: tomllib.loads(file.read_text()) for file in files}


@pytest.fixture(scope="session")
def lock() -> dict[str, Any]:
    """The contents of uv.lock."""
    return tomllib.loads((ROOT / "uv.lock").read_text())
