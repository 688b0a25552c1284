"""Children of ``multiprocessing``: they start their own interpreter and must find Chainer patched."""

import multiprocessing

import pytest

from mn_compat.helpers import worker_error

SCRIPT = """
import multiprocessing, sys
import chainer
import numpy


def summarize(values):
    summary = chainer.Summary()
    for value in values:
        summary.add(value)
    return float(summary.compute_mean()), type(chainer.reporter.__loader__).__name__


if __name__ == "__main__":
    values = numpy.full(3000, 1.2, numpy.float16)
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        mean, loader = pool.apply(summarize, (values,))
    assert mean == float(values[0]), mean
    print(loader)
"""


# Each task of the pool has a new worker.
RENEWED = """
import os
from chainer.iterators import MultiprocessIterator

options = {"n_processes": 2, "n_prefetch": 1, "shared_mem": 8, "maxtasksperchild": 1}
iterator = MultiprocessIterator(range(100), 1, **options)
counts = []
for number in range(50):
    next(iterator)
    if number in (9, 49):
        counts.append(len(os.listdir("/dev/fd")))
iterator.finalize()
print(counts[1] - counts[0])
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_are_patched(python, tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert python(script, method).stdout.strip() == "SubstitutingLoader"


def test_a_task_for_a_pool_whose_workers_are_all_being_replaced():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        workers, pool._pool[:] = pool._pool[:], []  # as the pool's thread does, before it starts others
        task = worker_error.Task(pool, abs, [-1, 2])
        pool._pool[:] = workers
        assert task.get(50) == [1, 2]


def test_workers_that_have_been_replaced_keep_no_files_open(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RENEWED)
    assert int(python(script).stdout) < 20  # one or two workers are alive, or have just ended


@pytest.mark.parametrize(
    ("status", "how"), [(-9, "killed by SIGKILL, as"), (-11, "killed by SIGSEGV, so"), (-40, "killed by signal 40, so")]
)
def test_every_signal_that_ends_a_worker_is_described(status, how):
    assert f" was {how} " in worker_error._describe(7, status)
