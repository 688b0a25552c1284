import importlib.util
import sys
from pathlib import Path

import pytest

FAKES = Path(__file__).parent / "fakes"
# Shared by mn-comm and this package.
sys.path.insert(0, str(Path(__file__).parents[2] / "mn-comm" / "tests" / "fakes"))

from shared_fixtures import comm, fake_cupy, name, world  # noqa: E402, F401


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine for the doctor to check, which tests can break."""
    spec = importlib.util.spec_from_file_location("doctor_fakes", FAKES / "doctor_fakes.py")
    fakes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fakes)
    return fakes.Machine(tmp_path, monkeypatch)
