"""The example, until it has learned the digits."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

SCRIPT = Path(__file__).parents[2] / "examples/mnist/train_mnist.py"
# The example's initial weights are random, and the accuracy of some is 0.95 and not more.
SEEDED = """
import os, runpy, sys
import numpy as np
np.random.seed(0)
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_learns_the_digits(mpiexec, tmp_path, ranks):
    printed = mpiexec(ranks, "-c", SEEDED, SCRIPT, "-e", "20", "-b", str(60 // ranks), "-u", "200", "-o", "out")
    (accuracy,) = re.findall(r"validation accuracy: (.*)", printed)
    assert float(accuracy) > 0.95
    assert printed.count("main/accuracy  validation/main/accuracy") == 1  # one table, from rank 0
    for picture in ("loss.png", "accuracy.png"):
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")
    log = json.loads((tmp_path / "out" / "log").read_text())
    assert [entry["epoch"] for entry in log] == list(range(1, 21))
    assert log[-1]["main/loss"] < 0.5 * log[0]["main/loss"]
