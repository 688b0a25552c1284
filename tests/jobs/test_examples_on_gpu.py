"""The examples with ``--gpu`` on two ranks: their losses are those in host memory; and a job that is started again."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
RUNS = {
    "cifar/train_cifar.py": ("-b 16 --width 4 -l 0.001", "sklearn"),
    "dcgan/train_dcgan.py": ("-b 4 --width 8 --display_interval 100", "PIL"),
    "mnist/train_mnist.py": ("-b 20 -u 20", "sklearn"),
    "mnist/train_mnist_checkpoint.py": ("-b 20 -u 20", "sklearn"),
    "mnist/train_mnist_model_parallel.py": ("-b 20 -u 20", "sklearn"),
    "parallel_convolution/train_parallel_convolution.py": ("-b 8 -c 4 4", "sklearn"),
    "seq2seq/seq2seq.py": ("-b 4 --size 60 -u 8", "num2words"),
    "seq2seq/seq2seq_mp1.py": ("-b 4 --size 60 -u 8", "num2words"),
}


@pytest.mark.parametrize("script", RUNS)
def test_losses_are_those_of_the_host(mpiexec, tmp_path, script):
    options, needed = RUNS[script]
    pytest.importorskip(needed)
    found = []
    for where, option in (("host", []), ("gpu", ["--gpu"])):
        command = [HERE / "losses_of_example.py", tmp_path / where, EXAMPLES / script, *options.split(), *option]
        mpiexec(2, *command, "-o", tmp_path / f"out-{where}")
        found.append([json.loads((tmp_path / f"{where}-{rank}").read_text()) for rank in range(2)])
    host, gpu = found
    assert [len(each) for each in host] == [5, 5]
    assert any(losses for rank in host for losses in rank)
    for expected, actual in zip(host, gpu, strict=True):
        assert actual == [pytest.approx(each, rel=1e-4, abs=1e-4) for each in expected]


def test_a_job_that_is_started_again(tmp_path):
    """The state of a model on a device is held in memory, and returns to the device."""
    pytest.importorskip("sklearn")
    losses = []
    for device in "@numpy", "@cupy:0":
        command = [sys.executable, "-m", "mn_comm", "elastic", "-n", "2", EXAMPLES / "features" / "restart.py"]
        done = subprocess.run([*command, "--device", device], cwd=tmp_path, capture_output=True, text=True, timeout=220)
        assert done.returncode == 0, done.stderr
        found = re.search(r"killed after step 60, continued after step 50: 120 steps, loss (\S+)$", done.stdout, re.M)
        assert found, done.stdout
        losses.append(float(found[1]))
    assert losses[1] == pytest.approx(losses[0], abs=0.002)
