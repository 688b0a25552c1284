"""A snapshot of state that was sharded on four ranks can be used wherever one of Chainer's can."""

import os
import shutil
import subprocess
import sys

import pytest

RANKS = 4
SCRIPT = """
import hashlib, sys
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer.serializers import load_npz, npz, save_npz

what, begin, end = sys.argv[1], *map(int, sys.argv[2:])
rank = 0
optimizer = chainer.optimizers.Adam()
if what != "plain":
    import chainermn
    comm = chainermn.create_communicator("naive" if what == "old" else "two_dimensional")
    rank = comm.rank
    if what == "sharded":
        from chainermn.optimizers import MultiNodeOptimizer, Sharded

        optimizer = MultiNodeOptimizer(optimizer, comm, Sharded())
    else:
        optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)


class MLP(chainer.Chain):
    def __init__(self):
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        super().__init__(l1=L.Linear(20, 60, initialW=initial), l2=L.Linear(60, 30, initialW=initial),
                         l3=L.Linear(30, 5, initialW=initial))

    def forward(self, x, t):
        return F.softmax_cross_entropy(self.l3(F.tanh(self.l2(F.tanh(self.l1(x))))), t)


def digest(target):
    hashed = hashlib.sha256()
    for name, value in sorted(npz.serialize(target).items()):
        hashed.update(repr((name, value.dtype)).encode() + np.asarray(value).tobytes())
    return hashed.hexdigest()[:16]


model = MLP()
optimizer.setup(model)
if begin:
    load_npz(f"model_{begin}", model)
    load_npz(f"optimizer_{begin}", optimizer)
    if what == "sharded":
        optimizer.assume_synchronized()
        optimizer.consolidate()
    digests = digest(model), rank == 0 and digest(optimizer)
    if rank == 0:
        print("loaded", *digests)
for iteration in range(begin, end):
    random = np.random.RandomState(100 * iteration + rank)
    optimizer.update(model, random.rand(6, 20).astype("f4"), random.randint(0, 5, 6).astype("i4"))
    if what == "sharded":
        optimizer.consolidate()
    if rank == 0 and iteration + 1 in (3, 6):  # alone, and never again
        save_npz(f"model_{iteration + 1}", model)
        save_npz(f"optimizer_{iteration + 1}", optimizer)
        print("saved", iteration + 1, digest(model), digest(optimizer))
"""


def run(folder, ranks, what, begin, end, **environment):
    command = [sys.executable, "-c", SCRIPT, what, str(begin), str(end)]
    if ranks:
        mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
        command = [mpiexec, "-n", str(ranks), *command]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in done.stdout.splitlines() if line.startswith(("loaded", "saved"))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of the snapshots, and what was saved."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run(folder, RANKS, "sharded", 0, 6)


def test_it_is_what_is_saved_where_nothing_is_sharded(saved, tmp_path):
    assert run(tmp_path, RANKS, "whole", 0, 6) == saved[1]


def test_the_training_goes_on_bit_for_bit(saved):
    folder, lines = saved
    assert run(folder, RANKS, "sharded", 3, 6)[1:] == lines[1:]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("what", ["sharded", "whole"])
def test_other_numbers_of_ranks(saved, ranks, what):
    folder, lines = saved
    found = run(folder, ranks, what, 3, 5)
    assert found == [["loaded", *lines[0][2:]]]


def test_chainer_alone(saved):
    folder, lines = saved
    assert run(folder, 0, "plain", 3, 5) == [["loaded", *lines[0][2:]]]


def test_the_old_multi_node_optimizer(saved):
    pytest.importorskip("mpi4py")
    folder, lines = saved
    assert run(folder, 2, "old", 3, 5, CHAINERMN_IMPL="bundled") == [["loaded", *lines[0][2:]]]
