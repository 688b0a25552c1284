"""The example, started as the README describes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

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


def test_it_resumes_from_a_snapshot(mpiexec, tmp_path):
    arguments = (SCRIPT, "-b", "50", "-u", "30", "-x", "naive", "-o", "out")
    mpiexec(2, *arguments, "-e", "2")
    (snapshot,) = (tmp_path / "out").glob("snapshot_iter_*")
    mpiexec(2, *arguments, "-e", "3", "-r", snapshot)
    log = json.loads((tmp_path / "out" / "log").read_text())
    assert [entry["epoch"] for entry in log] == [1, 2, 3]


def test_it_reads_a_file(mpiexec, tmp_path):
    random = np.random.RandomState(0)
    np.savez(
        tmp_path / "mnist.npz",
        x_train=random.randint(0, 256, (60, 28, 28), dtype=np.uint8),
        y_train=random.randint(0, 10, 60, dtype=np.uint8),
        x_test=random.randint(0, 256, (20, 28, 28), dtype=np.uint8),
        y_test=random.randint(0, 10, 20, dtype=np.uint8),
    )
    printed = mpiexec(2, SCRIPT, "-e", "1", "-b", "10", "-u", "10", "--data", "mnist.npz")
    assert "60 images to learn from" in printed
