"""Features of the examples of checkpoints and of images other than learning."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_checkpoints(mpiexec, tmp_path):
    script = EXAMPLES / "mnist/train_mnist_checkpoint.py"
    arguments = ("-u", "20", "-e", "1", "-b", "100", "--interval", "3", "-i", "run.1")
    assert "starts from iteration 0" in mpiexec(2, script, *arguments)
    assert not list((tmp_path / "result").glob("run.1.*"))  # it ended normally


def test_cifar(mpiexec, tmp_path):
    script = EXAMPLES / "cifar/train_cifar.py"
    printed = mpiexec(2, script, "-e", "1", "-b", "100", "--width", "4", "-o", "out")
    assert re.search(r"validation accuracy: 0\.\d+", printed)
    mpiexec(2, script, "-e", "2", "-b", "100", "--width", "4", "-o", "out", "-r")
    assert (tmp_path / "out" / "log").read_text().count('"epoch"') == 2


def test_imagenet_with_large_batches(mpiexec, tmp_path):
    pytest.importorskip("skimage")
    folder = EXAMPLES / "imagenet"
    mpiexec(1, folder / "make_pictures.py", "pictures", "--digits", "300", "--cuts", "10")
    mpiexec(1, folder / "compute_mean.py", "pictures/train.txt", "--root", "pictures")
    arguments = "--root pictures --arch tiny --classes 20 -B 16 -j 1 -E 4 --recipe large --micro-batches 2 -o out"
    mpiexec(2, folder / "train_imagenet.py", "pictures/train.txt", "pictures/val.txt", *arguments.split())
    log = json.loads((tmp_path / "out" / "log").read_text())
    assert log[-1]["main/loss"] < 0.8 * log[0]["main/loss"]


# Read from the text, because importing it requires Chainer.
NETWORKS = re.findall(r'^    "(\w+)": \w+,$', (EXAMPLES / "imagenet/models.py").read_text(), re.MULTILINE)
STEP = """
import sys
import chainer, chainermn
import numpy as np

sys.path.insert(0, sys.argv[1])
import models

comm = chainermn.create_communicator()
random = np.random.RandomState(comm.rank)
pictures = random.rand(2, 3, 96, 96).astype(np.float32)
classes = random.randint(0, 5, 2).astype(np.int32)
model = models.ARCHITECTURES[sys.argv[2]](5)
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0.01), comm).setup(model)
optimizer.update(model, pictures, classes)  # broadcasts
before = {name: param.array.copy() for name, param in model.namedparams()}
optimizer.update(model, pictures, classes)
for name, param in sorted(model.namedparams()):
    assert np.isfinite(param.array).all(), name
    assert param.grad is not None, name
    np.testing.assert_array_equal(param.array, comm.bcast(param.array), name)
changed = [name for name, param in model.namedparams() if (param.array != before[name]).any()]
with chainer.using_config("train", False):
    loss = model(pictures, classes)
print("%d of %d changed, loss %f" % (len(changed), len(before), loss.array))
"""


def test_the_networks_of_the_old_example_are_there():
    assert {"alex", "googlenet", "googlenetbn", "nin", "resnet50"} <= set(NETWORKS)


@pytest.mark.parametrize("arch", NETWORKS)
def test_every_network_for_imagenet_takes_a_step(mpiexec, arch):
    printed = mpiexec(2, "-c", STEP, EXAMPLES / "imagenet", arch)
    found = re.findall(r"(\d+) of (\d+) changed", printed)
    assert len(found) == 2
    for changed, all_ in found:
        assert int(changed) > 0.9 * int(all_)  # a ReLU may be zero for so few pictures
