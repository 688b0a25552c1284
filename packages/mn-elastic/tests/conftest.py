import sys
from pathlib import Path

# The stand-ins of this package, and the fixtures of mn-comm.
sys.path.insert(0, str(Path(__file__).parents[2] / "mn-comm" / "tests" / "fakes"))
sys.path.insert(0, str(Path(__file__).parent / "fakes"))

from shared_fixtures import comm, name, world  # noqa: F401
