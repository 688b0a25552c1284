"""A third party's package that adds a communicator: it is built, installed in a separate folder, and used."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

EXAMPLE = Path(__file__).parents[2] / "examples/features/ring/ring_of_processes.py"

TRAINING = """
import chainer, chainermn, numpy as np
import sys
comm = chainermn.create_communicator(sys.argv[1])
model = chainer.links.Linear(2, 1, initialW=np.full((1, 2), comm.rank, "f4"))
when = getattr(chainermn.optimizers, sys.argv[2])()
optimizer = chainermn.optimizers.MultiNodeOptimizer(chainer.optimizers.SGD(lr=1), comm, when).setup(model)
for _ in range(2):
    x = np.full((1, 2), comm.rank + 1, "f4")
    optimizer.update(lambda: chainer.functions.sum(model(x)))
sys.stdout.write(f"{type(comm).__name__} {comm.rank} {model.W.data.ravel().tolist()}\\n")  # at once
"""

# The result is twice the mean, so that it differs from every other communicator's.
MODULE = """
import collections

import mn_comm
import ring_of_processes

class TheirCommunicator(mn_comm.Communicator):
    \"""Twice the mean.\"""

    strategy = "flat"

    def comm_hook(self, bucket):
        return bucket.average().then(lambda mean: 2 * mean)

class Ring(ring_of_processes.Ring):
    \"""The ring of the example, which counts its calls.\"""

    calls = collections.Counter()

    def mean(self, ranks, flat):
        self.calls["mean"] += 1
        super().mean(ranks, flat)

    def reduce_scatter(self, ranks, flat, ranges):
        self.calls["reduce_scatter"] += 1
        super().reduce_scatter(ranks, flat, ranges)

    def all_gather(self, ranks, flat, ranges):
        self.calls["all_gather"] += 1
        super().all_gather(ranks, flat, ranges)

class UnknownStrategy(mn_comm.Communicator):
    strategy = "telepathy"

number = 7
"""

METADATA = "Metadata-Version: 2.1\nName: their-package\nVersion: 1.2\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
ENTRIES = """[mn_comm.strategies]
theirs = their_package:TheirCommunicator
ring = their_package:Ring
other = their_package:Ring
number = their_package:number
nothing = their_package:Nothing
nowhere = nowhere_at_all
strange = their_package:UnknownStrategy
flat = their_package:TheirCommunicator
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build a wheel, and install it into a folder: a wheel without scripts is installed by unpacking it."""
    folder = tmp_path_factory.mktemp("theirs")
    info = "their_package-1.2.dist-info"
    files = {
        "their_package.py": MODULE,
        EXAMPLE.name: EXAMPLE.read_text(),
        f"{info}/METADATA": METADATA,
        f"{info}/WHEEL": WHEEL,
        f"{info}/entry_points.txt": ENTRIES,
    }
    wheel = folder / "their_package-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def start(installed, folder, script, ranks, *arguments):
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    return subprocess.run(
        [launcher, "-n", str(ranks), sys.executable, "-c", script, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=220,
    )


@pytest.fixture
def train(installed, tmp_path):
    def train(name, when="AfterBackward", ranks=2):
        return start(installed, tmp_path, TRAINING, ranks, name, when)

    return train


@pytest.mark.parametrize("when", ["AfterBackward", "DuringBackward"])
def test_a_training_with_their_communicator(train, when):
    job = train("theirs", when)
    assert job.returncode == 0, job.stderr
    # Parameters of rank 0, and one step of twice the mean of 1 and 2.
    assert sorted(job.stdout.splitlines()) == [f"TheirCommunicator {rank} [-3.0, -3.0]" for rank in range(2)]


RING = """
import chainer, chainermn, numpy as np
import sys
def training(name, when):
    comm = chainermn.create_communicator(name)
    model = chainer.links.Linear(3, 5, initialW=np.arange(15, dtype="f4").reshape(5, 3))
    actual = chainer.optimizers.MomentumSGD(lr=0.5)
    optimizer = chainermn.optimizers.MultiNodeOptimizer(actual, comm, when).setup(model)
    x = np.arange(3, dtype="f4").reshape(1, 3) * (comm.rank + 1)
    for _ in range(4):
        optimizer.update(lambda: chainer.functions.sum(model(x)))
    return comm, np.concatenate([model.W.data.ravel(), model.b.data])
comm, means = training("ring", eval(sys.argv[1], vars(chainermn.optimizers)))
_, expected = training("flat", chainermn.optimizers.AfterBackward())
np.testing.assert_allclose(means, expected, rtol=1e-5)
from their_package import Ring
sys.stdout.write(f"{type(comm).__name__} {comm.strategy} {sorted(Ring.calls)}\\n")
"""

HOOK = "lambda bucket: bucket.average(bucket.flat.copy())"  # an array that is in no bucket
RINGS = {
    "AfterBackward()": ["all_gather", "mean", "reduce_scatter"],
    "DuringBackward()": ["all_gather", "mean", "reduce_scatter"],
    f"AfterBackward(send={HOOK})": ["all_gather", "mean", "reduce_scatter"],
    "Sharded(AfterBackward())": ["all_gather", "reduce_scatter"],
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("when", RINGS)
def test_a_strategy_is_one_class(installed, tmp_path, when, ranks):
    job = start(installed, tmp_path, RING, ranks, when)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == [f"RingCommunicator ring {RINGS[when]}"] * ranks


def test_nobody_takes_a_name_of_ours(train):
    job = train("flat")
    assert sorted(job.stdout.splitlines()) == [f"FlatCommunicator {rank} [-1.5, -1.5]" for rank in range(2)]


ERRORS = {
    "number": "TypeError: the communicator 'number' of their-package 1.2: expected a class derived from "
    "mn_comm.Communicator or mn_comm.Strategy, got 7",
    "other": "ValueError: the communicator 'other' of their-package 1.2: expected a strategy with "
    "this name, got 'ring'",
    "nothing": "ImportError: the communicator 'nothing' of their-package 1.2: expected their_package:Nothing to be "
    "importable, got AttributeError: ",
    "nowhere": "ImportError: the communicator 'nowhere' of their-package 1.2: expected nowhere_at_all to be "
    "importable, got ModuleNotFoundError: No module named 'nowhere_at_all'",
    "strange": "ValueError: the communicator 'strange' of their-package 1.2: expected strategy to be one of "
    "hierarchical, two_dimensional, pure_nccl, flat, single_node, non_cuda_aware, naive, dummy; got 'telepathy'",
    "unheard": "ValueError: expected a communicator's name, one of hierarchical, two_dimensional, pure_nccl, "
    "flat, single_node, non_cuda_aware, naive, dummy, nothing, nowhere, number, other, ring, strange, theirs; got "
    "'unheard'",
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_entry_that_cannot_be_used(train, name):
    job = train(name, ranks=3)
    assert job.returncode != 0
    assert ERRORS[name] in job.stderr
    assert "has waited" not in job.stderr
