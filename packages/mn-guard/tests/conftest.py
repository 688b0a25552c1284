import sys
from pathlib import Path

# The stand-ins and fixtures of mn-comm.
sys.path.insert(0, str(Path(__file__).parents[2] / "mn-comm" / "tests" / "fakes"))

from shared_fixtures import comm, fake_cupy, name, world  # noqa: F401
