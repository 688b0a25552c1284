"""The scripts of the pages on surviving failures, with ranks killed as described there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

DOCS = Path(__file__).parents[2] / "docs"
KILL = """
import os, signal
steps = []
@comm.on_commit
def kill():
    steps.append(1)
    if comm.size == 3 and comm.rank == 1 and len(steps) == 40:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def script_of(page):
    """Return the one script that a page shows."""
    (code,) = re.findall(r"^```py\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
    return code


def test_the_script_goes_on(survivors, tmp_path):
    beginning, loop, end = script_of("surviving-in-place.md").partition("while iterator.epoch")
    (tmp_path / "survivor.py").write_text(beginning + KILL + loop + end)
    printed = survivors("survivor.py")
    assert re.search(r"^lost rank 1 of 3, 2 continue \(\d+ ms\)$", survivors.stderr, re.M), survivors.stderr
    lines = re.findall(r"^epoch (\d+), (\d) ranks: ([\d.]+)$", printed, re.M)
    assert [int(epoch) for epoch, *_ in lines] == list(range(1, 21))
    assert (lines[0][1], lines[-1][1]) == ("3", "2")
    assert float(lines[-1][2]) < float(lines[0][2])


KILL_ALL = """
import os, signal

@trainer.extend
@chainer.training.make_extension(trigger=(12, "iteration"))
def kill(trainer):
    if os.environ["CHAINERMN_SUPERVISOR"].endswith(" 1"):
        os.kill(os.getpid(), signal.SIGKILL)

print("went on from", keeper.maybe_load(trainer), flush=True)
trainer.run()
"""


def test_the_other_script_is_started_again(launcher, tmp_path):
    beginning, _, end = script_of("restarting.md").partition("keeper.maybe_load(trainer)\n")
    assert end == "trainer.run()\n"
    (tmp_path / "train.py").write_text(beginning + KILL_ALL)
    job = subprocess.run(
        [sys.executable, "-m", "chainermn", "elastic", "-n", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.splitlines()) == ["went on from 10"] * 2 + ["went on from None"] * 2
    assert job.stderr.rstrip().endswith("the training is complete, after 1 restart")
