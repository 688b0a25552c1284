import sys
from pathlib import Path

from hypothesis import settings

# What several files use.
sys.path.insert(0, str(Path(__file__).with_name("fakes")))
sys.path.append(str(Path(__file__).parents[2] / "mn-comm/tests/fakes"))

# Under mpiexec, every rank must try the same examples in the same order, and none may stop to shrink one by itself.
settings.register_profile("ranks", derandomize=True, database=None, deadline=None, max_examples=25)
settings.load_profile("ranks")
