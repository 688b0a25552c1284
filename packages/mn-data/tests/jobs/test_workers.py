"""Iterators whose samples are created by worker processes, which import the script again."""

import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, sys
import mn_data
import chainer, numpy as np
from mn_comm import create_communicator
from mn_data import create_multi_node_iterator, create_synchronized_iterator, scatter_dataset


class Data(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 12

    def get_example(self, i):
        return np.full(2, i, np.uint8), np.int32(i)


def make():
    return chainer.iterators.MultiprocessIterator(Data(), 4, n_processes=1)


def main():
    comm = create_communicator("naive")
    part = scatter_dataset(Data() if comm.rank == 0 else None, comm)
    iterator = chainer.iterators.MultiprocessIterator(part, 3, n_processes=1, shuffle=False)
    assert [int(t) for _, t in iterator.next()] == [int(t) for _, t in [part[i] for i in range(3)]]
    iterator.finalize()
    for iterator in (
        create_multi_node_iterator(make() if comm.rank == 0 else None, comm),
        create_synchronized_iterator(make(), comm),
    ):
        batches = [[int(t) for _, t in iterator.next()] for _ in range(7)]
        assert all(other == batches for other in comm.allgather_obj(batches)), batches
        assert iterator.epoch == 2
        # What any rank has saved, an iterator with workers goes on from.
        chainer.serializers.save_npz(f"iterator.{comm.rank}", iterator)
        expected = [[int(t) for _, t in iterator.next()] for _ in range(2)]
        plain = make()
        chainer.serializers.load_npz(f"iterator.{comm.rank}", plain)
        assert plain.epoch_detail == 7 / 3
        assert [[int(t) for _, t in plain.next()] for _ in range(2)] == expected
        assert plain.epoch == iterator.epoch == 3
        plain.finalize()
        iterator.finalize()
    print("rank", comm.rank, "done")


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    main()
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_with_worker_processes(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    command = [launcher, "-n", "2", sys.executable, str(script), method]
    job = subprocess.run(command, capture_output=True, text=True, timeout=70, cwd=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("done") == 2
