"""Results of this package and of the ChainerMN in Chainer's wheel in a script, compared."""

import os
import shutil
import subprocess
import sys

RANKS = 3

BEGINNING = """
import os, sys
import numpy as np
import mn_compat

if os.environ.get("CHAINERMN_IMPL") == "bundled":
    from chainermn import create_communicator, scatter_dataset
    assert os.path.basename(os.path.dirname(os.path.dirname(sys.modules["chainermn"].__file__))) == "site-packages"
else:
    from mn_comm import create_communicator
    from mn_data import scatter_dataset
import chainer
from chainer import datasets

comm = create_communicator("naive")


told = open(f"{sys.argv[1]}.{comm.rank}", "w")

"""

SCATTER = """
X = np.arange(22, dtype="f4").reshape(11, 2)
T = list("abcdefghijk")


class Sevens(datasets.SubDataset):
    def get_example(self, i):
        return 7


class Swapped(datasets.TupleDataset):
    def __getitem__(self, i):
        return super().__getitem__(i)[::-1]


class Counted(datasets.DictDataset):
    def __getitem__(self, i):
        return len(super().__getitem__(i))


class Loud(list):
    def __getitem__(self, i):
        return super().__getitem__(i).upper()


class Sums(np.ndarray):
    def __getitem__(self, i):
        return np.asarray(self).sum() + i


class Lazy(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 11

    def get_example(self, i):
        return i * i


DATASETS = [
    Sevens(T, 0, 11),
    datasets.SubDataset(Sevens(T, 0, 11), 1, 9),
    datasets.TupleDataset(X, Sevens(T, 0, 11)),
    Swapped(X, T),
    Counted(x=X, t=T),
    Loud(T),
    X.view(Sums),
    Lazy(),
    X,
    T,
    datasets.TupleDataset(X, T),
    datasets.DictDataset(x=X, t=T),
    datasets.SubDataset(datasets.TupleDataset(X, T), 2, 10, np.random.RandomState(1).permutation(11)),
]
for number, dataset in enumerate(DATASETS):
    for kwds in ({}, {"shuffle": True, "seed": 5}, {"force_equal_length": False, "root": 1}):
        mine = scatter_dataset(dataset if comm.rank == kwds.get("root", 0) else None, comm, **kwds)
        print(number, type(mine).__name__, len(mine), [mine[i] for i in range(len(mine))], file=told)
"""


def told(script, implementation, folder):
    """Return what each rank writes, with one implementation."""
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    command = [launcher, "-n", str(RANKS), sys.executable, "-c", BEGINNING + script, implementation]
    environ = {**os.environ, "CHAINERMN_IMPL": implementation}
    job = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    assert job.returncode == 0, job.stdout + job.stderr
    return [(folder / f"{implementation}.{rank}").read_text() for rank in range(RANKS)]


def test_scattered_samples(tmp_path):
    ours, old = told(SCATTER, "ours", tmp_path), told(SCATTER, "bundled", tmp_path)
    for rank in range(RANKS):
        assert old[rank].count("SubDataset") == 39
        assert ours[rank] == old[rank]
