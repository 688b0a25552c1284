"""The output of the script that counts the lines of an update."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "trace_update.py"


def test_an_update_passes_through_few_lines_with_every_strategy():
    done = subprocess.run(
        ["mpiexec", "-n", "2", sys.executable, SCRIPT, "--nodes", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rows = re.findall(r"^(\w+) +(plain|overlap|double_buffering) +(\d+) +(\d+) +(\d+) ", done.stdout, re.M)
    assert len(rows) == 5 * 3, done.stdout
    assert {row[0] for row in rows} == {"naive", "flat", "hierarchical", "two_dimensional", "non_cuda_aware"}
    most = {"plain": (15, 420), "overlap": (15, 590), "double_buffering": (16, 660)}
    for _, scheme, files, lines, run in rows:
        most_files, most_lines = most[scheme]
        assert int(files) <= most_files
        assert 100 < int(run) <= int(lines) <= most_lines
