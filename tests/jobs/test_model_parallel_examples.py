"""The examples of models that span processes, started as their texts describe."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("ranks", "script", "arguments"),
    [
        (2, "mnist/train_mnist_model_parallel.py", ["-e", "5", "-b", "50", "-u", "100"]),
        (4, "mnist/train_mnist_dual_parallel.py", ["-e", "5", "-b", "25", "-u", "100"]),
        (2, "parallel_convolution/train_parallel_convolution.py", ["-e", "4", "-c", "8", "16"]),
        (3, "parallel_convolution/train_parallel_convolution.py", ["-e", "4", "-c", "8", "16"]),
    ],
)
def test_it_learns_the_digits(mpiexec, ranks, script, arguments):
    printed = mpiexec(ranks, EXAMPLES / script, *arguments, "-o", "out")
    (accuracy,) = re.findall(r"validation accuracy: (.*)", printed)
    assert float(accuracy) > 0.85


@pytest.mark.parametrize("script", ["seq2seq.py", "seq2seq_mp1.py"])
def test_it_learns_to_translate(mpiexec, tmp_path, script):
    pytest.importorskip("num2words")
    printed = mpiexec(2, EXAMPLES / "seq2seq" / script, "-e", "8", "--size", "1000", "-u", "64", "-o", "out")
    (score,) = re.findall(r"BLEU: (.*)", printed)
    assert float(score) > 0.1
    losses = [entry["main/decoder/loss"] for entry in json.loads((tmp_path / "out" / "log").read_text())]
    assert losses[-1] < 0.6 * losses[0]
