"""The script of the page on surviving failures, with a rank killed as the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/surviving-failures.md"
KILL = """
import os, signal
steps = []
@comm.on_commit
def kill():
    steps.append(1)
    if comm.size == 3 and comm.rank == 1 and len(steps) == 40:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_script_goes_on(launcher, tmp_path):
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    beginning, loop, end = code.partition("while iterator.epoch")
    (tmp_path / "survivor.py").write_text(beginning + KILL + loop + end)
    job = subprocess.run(
        [launcher, "--with-ft", "ulfm", "-n", "3", sys.executable, "survivor.py"],
        cwd=tmp_path,
        env={**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=70,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert re.search(r"^lost rank 1 of 3, 2 go on \(\d+ ms\)$", job.stderr, re.M), job.stderr
    lines = re.findall(r"^epoch (\d+), (\d) ranks: ([\d.]+)$", job.stdout, re.M)
    assert [int(epoch) for epoch, *_ in lines] == list(range(1, 21))
    assert (lines[0][1], lines[-1][1]) == ("3", "2")
    assert float(lines[-1][2]) < float(lines[0][2])
