"""The benchmark, started from a shell."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.rest

SCRIPT = """
import time
import types

import numpy as np


class Model:
    def __init__(self):
        self.param = types.SimpleNamespace(data=np.zeros((30, 20), np.float32), grad=None)

    def namedparams(self):
        yield "/W", self.param


def make():
    return Model()


def compute(model):
    assert isinstance(model, Model)
    time.sleep(0.003)
"""


def bench(*argv, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "mn_comm", "bench", *argv],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_starts_the_ranks_itself(ranks, tmp_path):
    file = tmp_path / "figures.json"
    # If there are more ranks than cores, each average takes a time slice; of 8 bytes, there would be many.
    job = bench("--ranks", str(ranks), "--sizes", "32K,64K", "--rounds", "2", "--json", str(file))
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines()[-1].startswith("for 64 KiB of gradients choose ")
    assert json.loads(file.read_text())["machines"]["ranks"] == ranks


def test_it_recommends_how_to_train_a_model(tmp_path):
    shapes, file = tmp_path / "shapes.txt", tmp_path / "figures.json"
    shapes.write_text("100x50\n100\n10x100\n")
    argv = ["--ranks", "2", "--model", str(shapes), "--compute", "2ms", "--seconds", "1s", "--json", str(file)]
    job = bench(*argv)
    assert job.returncode == 0, job.stderr
    assert f"{shapes}: 0.0244 MB in 3 arrays; forward and backward pass: 2.00 ms" in job.stdout
    assert "Choose this; it does not change the training" in job.stdout
    figures = json.loads(file.read_text())
    assert (figures["machines"]["ranks"], figures["arrays"], figures["bytes"]) == (2, 3, 24400)
    # Three communicators that average exactly in two ways; one step late, four compressions in two ways, local steps.
    assert len(figures["choices"]) == 3 * 2 + 1 + 4 * 2 + 3
    assert all(each["step_seconds"] > 0 for each in figures["choices"])
    assert figures["recommended"]["same_training"]["same_training"]
    assert figures["recommended"]["any"] in figures["choices"]


def test_it_takes_a_model_and_its_computation_from_a_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    argv = ["--ranks", "2", "--model", "script:make", "--compute", "script:compute", "--seconds", "1s", "--json"]
    job = bench(*argv, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    figures = json.loads(job.stdout)
    assert (figures["model"], figures["arrays"]) == ("script:make", 1)
    assert 0.003 < figures["compute_seconds"]


def test_alone_it_says_how_it_is_started():
    job = bench()
    assert (job.returncode, job.stdout) == (2, "")
    assert "python -m mn_comm bench --ranks 4" in job.stderr
