import sys
from pathlib import Path

from hypothesis import settings

# The stand-ins and fixtures of mn-comm.
sys.path.insert(0, str(Path(__file__).parents[2] / "mn-comm" / "tests" / "fakes"))

from on_gpu import devices, make  # noqa: F401
from shared_fixtures import comm, fake_cupy, many_blocks, name, on_nodes, world  # noqa: F401
from skip_without_gpu import pytest_collection_modifyitems  # noqa: F401

# Under mpiexec, every rank must try the same examples in the same order, and none may stop to shrink one by itself.
settings.register_profile("ranks", derandomize=True, database=None, deadline=None, max_examples=25)
settings.load_profile("ranks")
