import importlib.util
import sys
from pathlib import Path

import pytest

# The fixtures of mn-comm.
sys.path.insert(0, str(Path(__file__).parents[2] / "mn-comm" / "tests" / "fakes"))

from on_gpu import devices  # noqa: F401
from shared_fixtures import world  # noqa: F401

# This package's doctor is tested on the same broken machines as the doctor of mn-tools.
FAKES = Path(__file__).parents[2] / "mn-tools" / "tests" / "fakes" / "doctor_fakes.py"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine for the doctor to check, which tests can break."""
    spec = importlib.util.spec_from_file_location("doctor_fakes", FAKES)
    fakes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fakes)
    return fakes.Machine(tmp_path, monkeypatch)
