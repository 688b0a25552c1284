import sys
from pathlib import Path

# The fixtures of mn-comm.
sys.path.insert(0, str(Path(__file__).parents[2] / "mn-comm" / "tests" / "fakes"))

from shared_fixtures import comm, name, world  # noqa: F401
