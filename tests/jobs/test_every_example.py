"""Every training script in examples/, for a few iterations on its default data: its loss falls, its pictures exist.

Other features of the examples are tested in the files beside this one, and so are the scripts in features/.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

EXAMPLES = Path(__file__).parents[2] / "examples"
PNG = b"\x89PNG"


@dataclass(frozen=True)
class Run:
    """How a script is started, and which files it leaves in its folder."""

    arguments: str
    ranks: int = 2
    losses: tuple[str, ...] = ("main/loss",)
    pictures: tuple[str, ...] = ("loss.png",)
    needs: str = "sklearn"


RUNS = {
    "cifar/train_cifar.py": Run("-e 3 -b 25 --width 8"),
    "dcgan/train_dcgan.py": Run(
        "-e 2 -b 50 --width 8 --snapshot_interval 10 --display_interval 5",
        losses=("dis/loss",),  # the other one's falls when this one's rises
        pictures=("loss.png", "preview/image00000010.png", "preview/image00000030.png"),
        needs="PIL",
    ),
    "imagenet/train_imagenet.py": Run(
        "pictures/train.txt pictures/val.txt --root pictures --arch tiny --classes 20 -B 16 -j 1 --test",
        needs="skimage",
    ),
    "mnist/train_mnist.py": Run("-e 5 -b 50 -u 50", pictures=("loss.png", "accuracy.png")),
    "mnist/train_mnist_checkpoint.py": Run("-e 5 -b 50 -u 50"),
    "mnist/train_mnist_dual_parallel.py": Run("-e 5 -b 50 -u 50", ranks=4),
    "mnist/train_mnist_model_parallel.py": Run("-e 5 -b 100 -u 50"),
    "parallel_convolution/train_parallel_convolution.py": Run("-e 2 -b 100 -c 8 16"),
    "seq2seq/seq2seq.py": Run("-e 3 --size 600 -u 32", losses=("main/decoder/loss",), needs="num2words"),
    "seq2seq/seq2seq_mp1.py": Run("-e 3 --size 600 -u 32", losses=("main/decoder/loss",), needs="num2words"),
}
# Scripts that create the input of other scripts; the tests of these run them first.
BEFORE = {
    "imagenet/train_imagenet.py": {
        "imagenet/make_pictures.py": "pictures --digits 300 --cuts 10",
        "imagenet/compute_mean.py": "pictures/train.txt --root pictures",
    }
}


def test_no_example_is_left_out():
    scripts = {
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*.py")
        if re.search(r"^if __name__ ==", path.read_text(), re.MULTILINE) and path.parent.name != "features"
    }
    assert scripts == {*RUNS, *(script for before in BEFORE.values() for script in before)}


def test_the_page_names_every_script():
    page = (EXAMPLES / "README.md").read_text()
    assert re.findall(r"^\| `(\S+\.py)` \|.* python examples/\1[ `]", page, re.MULTILINE) == re.findall(
        r"^\| `(\S+)` \|", page, re.MULTILINE
    )
    assert sorted(re.findall(r"^\| `(\S+)` \|", page, re.MULTILINE)) == sorted(RUNS)


@pytest.mark.parametrize("script", RUNS)
def test_its_loss_falls(mpiexec, tmp_path, script):
    run = RUNS[script]
    pytest.importorskip(run.needs)
    for first, arguments in BEFORE.get(script, {}).items():
        mpiexec(1, EXAMPLES / first, *arguments.split())
    mpiexec(run.ranks, EXAMPLES / script, *run.arguments.split(), "-o", "out")
    log = json.loads((tmp_path / "out" / "log").read_text())
    for name in run.losses:
        losses = [entry[name] for entry in log]
        assert losses[-1] < 0.95 * losses[0], losses
    for picture in run.pictures:
        assert (tmp_path / "out" / picture).read_bytes().startswith(PNG)
