"""The examples of images, checkpoints and adversaries, small."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_checkpoints(mpiexec, tmp_path):
    script = EXAMPLES / "mnist/train_mnist_checkpoint.py"
    arguments = ("-u", "20", "-e", "1", "-b", "100", "--interval", "3", "-i", "run.1")
    assert "starts from iteration 0" in mpiexec(2, script, *arguments)
    assert not list((tmp_path / "result").glob("run.1.*"))  # it ended well


def test_cifar(mpiexec, tmp_path):
    script = EXAMPLES / "cifar/train_cifar.py"
    printed = mpiexec(2, script, "-e", "1", "-b", "100", "--width", "4", "-o", "out")
    assert re.search(r"validation accuracy: 0\.\d+", printed)
    mpiexec(2, script, "-e", "2", "-b", "100", "--width", "4", "-o", "out", "-r")
    assert (tmp_path / "out" / "log").read_text().count('"epoch"') == 2


def test_dcgan(mpiexec, tmp_path):
    pytest.importorskip("PIL")
    script = EXAMPLES / "dcgan/train_dcgan.py"
    small = ("--width", "8", "--snapshot_interval", "5", "--display_interval", "5")
    mpiexec(2, script, "-e", "1", "-b", "150", "-o", "out", *small)
    assert list((tmp_path / "out" / "preview").glob("*.png"))


def test_imagenet(mpiexec, tmp_path):
    pytest.importorskip("skimage")
    folder = EXAMPLES / "imagenet"
    mpiexec(1, folder / "make_pictures.py", "pictures", "--digits", "120", "--cuts", "5")
    mpiexec(1, folder / "compute_mean.py", "pictures/train.txt", "--root", "pictures")
    lists = ("pictures/train.txt", "pictures/val.txt", "--root", "pictures")
    options = ("--arch", "tiny", "--classes", "20", "-B", "8", "-j", "1", "--test")
    printed = mpiexec(2, folder / "train_imagenet.py", *lists, *options)
    assert re.search(r"validation accuracy: \d\.\d+", printed)
