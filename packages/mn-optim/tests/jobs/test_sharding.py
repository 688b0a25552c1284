"""Sharded state that is saved by one rank while the others go on, end or fail."""

import os
import shutil
import subprocess
import sys

import pytest

HEAD = """
import gc, sys, threading, time
import numpy as np
import mn_optim
import chainer
from mn_comm import create_communicator

def make(comm):
    link = chainer.Link()
    with link.init_scope():
        for i in range(9):
            setattr(link, f"p{i}", chainer.Parameter(np.full(5, i, "f4")))
    optimizer = mn_optim.MultiNodeOptimizer(chainer.optimizers.Adam(), comm, mn_optim.Sharded()).setup(link)
    for _ in range(3):
        for param in link.params():
            param.grad = np.full(5, comm.rank + 1, "f4")
        optimizer.update()
    return optimizer

def save(optimizer):
    assert not [each for each in threading.enumerate() if "answers" in each.name]
    name = f"saved.{comm.rank}"
    chainer.serializers.save_npz(name, optimizer)
    with np.load(name) as saved:
        assert sorted(name for name in saved if name.endswith("/v")) == [f"p{i}/v" for i in range(9)]
    print("saved", flush=True)

comm = create_communicator("flat")
"""
SCRIPTS = {
    # In a script with functions, objects are deleted before the process ends.
    "in a function": """
def main():
    optimizer = make(comm)
    optimizer.consolidate()
    if comm.rank == 0:
        time.sleep(1)
        save(optimizer)
main()
gc.collect()
""",
    # Each gathers in its own group of ranks.
    "in several groups": """
groups = [comm.split(comm.rank % 2, comm.rank), comm, comm.split(0, -comm.rank)]
optimizers = {i: make(groups[i]) for i in range(3)}
for i, optimizer in optimizers.items():
    last = groups[i].size - 1
    optimizer.consolidate(to=last)
    if groups[i].rank == last:
        save(optimizer)
""",
    "while the others wait": """
optimizer = make(comm)
optimizer.consolidate()
if comm.rank == 0:
    time.sleep(0.2)
    save(optimizer)
comm.barrier()
""",
}


def run(folder, script, ranks=3):
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    return subprocess.run(
        [mpiexec, "-n", str(ranks), sys.executable, "-c", HEAD + script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_rank_saves(name, tmp_path):
    job = run(tmp_path, SCRIPTS[name])
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("saved") == (4 if "groups" in name else 1)


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_a_rank_that_fails_ends_the_others(end, status, tmp_path):
    job = run(tmp_path, f"optimizer = make(comm)\nif comm.rank == 1:\n    {end}\nmake(comm)\n")
    assert job.returncode == status, job.stdout + job.stderr
