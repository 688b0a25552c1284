import sys
from pathlib import Path

from hypothesis import settings

# What several packages need for their tests.
sys.path.insert(0, str(Path(__file__).parent / "fakes"))

from on_gpu import cuda_aware, devices, make, trace  # noqa: F401
from shared_fixtures import comm, many_blocks, name, on_nodes, world  # noqa: F401

# Under mpiexec, every rank must try the same examples in the same order, and none may stop to shrink one by itself.
settings.register_profile("ranks", derandomize=True, database=None, deadline=None, max_examples=25)
settings.load_profile("ranks")
