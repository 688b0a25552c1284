"""The example in which a process is killed: the others go on to the end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/features/survive_a_kill.py"


@pytest.mark.parametrize("victim", [1, 0])
def test_the_curve_goes_on(launcher, tmp_path, victim):
    pytest.importorskip("sklearn")
    options = "--epochs", "4", "--victim", str(victim)
    job = subprocess.run(
        [
            launcher,
            "--with-ft",
            "ulfm",
            "-n",
            "3",
            sys.executable,
            str(SCRIPT),
            *options,
        ],
        cwd=tmp_path,
        env={**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=70,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert re.search(r"^step \d+: 3 processes become 2$", job.stdout, re.M)
    (loss,) = re.findall(r"^101 steps, 3 processes at first, 2 at the end, loss (\S+)$", job.stdout, re.M)
    assert float(loss) < 0.5
    assert (tmp_path / "survive_a_kill.png").stat().st_size
