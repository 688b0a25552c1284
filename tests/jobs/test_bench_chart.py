"""The chart of ``python -m mn_comm bench``, which needs matplotlib: only the examples install it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.rest


@pytest.mark.parametrize(
    "what", [["--sizes", "8,64K", "--rounds", "1"], ["--model", "mlp", "--compute", "2ms", "--seconds", "1s"]]
)
def test_a_chart(what, tmp_path):
    file = tmp_path / "chart.png"
    argv = ["--ranks", "2", *what, "--plot", str(file)]
    job = subprocess.run([sys.executable, "-m", "mn_comm", "bench", *argv], capture_output=True, text=True, timeout=220)
    assert job.returncode == 0, job.stderr
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
