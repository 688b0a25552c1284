"""The benchmark, started from a shell."""

import json
import subprocess
import sys

import pytest


def bench(*argv):
    return subprocess.run(
        [sys.executable, "-m", "mn_comm", "bench", *argv],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_starts_the_ranks_itself(ranks, tmp_path):
    file = tmp_path / "figures.json"
    job = bench("--ranks", str(ranks), "--sizes", "8,64K", "--rounds", "2", "--json", str(file))
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines()[-1].startswith("for 64 KiB of gradients choose ")
    assert json.loads(file.read_text())["machines"]["ranks"] == ranks


def test_alone_it_says_how_it_is_started():
    job = bench()
    assert (job.returncode, job.stdout) == (2, "")
    assert "python -m mn_comm bench --ranks 4" in job.stderr
