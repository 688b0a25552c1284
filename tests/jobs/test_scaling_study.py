"""The scaling study in its quickest form: it measures, fits, and writes all files that it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

SCRIPT = Path(__file__).parents[2] / "benchmarks/scaling.py"


def run(*arguments):
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_measures_fits_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    printed = run("--quick", "--out", tmp_path)
    first, *points = [json.loads(line) for line in (tmp_path / "scaling.jsonl").read_text().splitlines()]
    assert first["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert {point["strategy"] for point in points} >= {"naive", "flat", "two_dimensional"}
    assert all(0 < point["seconds"] < 10 for point in points)
    assert {point["fitted"] for point in points} == {True, False}
    table = (tmp_path / "scaling.md").read_text()
    assert table.strip() in printed
    assert "## Predictions of what it was not fitted to" in table
    for picture in ("scaling-model.png", "scaling-efficiency.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
        (tmp_path / picture).unlink()
    assert table.strip() in run("--draw", "--out", tmp_path)  # the same points give the same model
    assert (tmp_path / "scaling-model.png").exists()
