"""The example, started as the README describes."""

import json
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).parents[2] / "examples/mnist/train_mnist.py"


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
