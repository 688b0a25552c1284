import sys
from pathlib import Path

# The stand-ins of this package, and those of mn-comm with its fixtures.
sys.path.insert(0, str(Path(__file__).parents[2] / "mn-comm" / "tests" / "fakes"))
sys.path.insert(0, str(Path(__file__).parent / "fakes"))

from shared_fixtures import comm, fake_cupy, name, world  # noqa: F401
