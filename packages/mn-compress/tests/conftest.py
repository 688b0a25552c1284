import sys
from pathlib import Path

# The fixtures of mn-comm.
sys.path.insert(0, str(Path(__file__).parents[2] / "mn-comm" / "tests" / "fakes"))

from on_gpu import devices, make, trace  # noqa: F401
from shared_fixtures import comm, many_blocks, name, on_nodes, world  # noqa: F401
