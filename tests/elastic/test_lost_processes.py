"""The example in which a process is killed: the others go on to the end."""

import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/features/survive_a_kill.py"


@pytest.mark.parametrize("victim", [1, 0])
def test_the_curve_goes_on(survivors, tmp_path, victim):
    pytest.importorskip("sklearn")
    printed = survivors(SCRIPT, "--epochs", 4, "--victim", victim)
    assert re.search(r"^step \d+: 3 processes become 2$", printed, re.M)
    (loss,) = re.findall(r"^101 steps, 3 processes at first, 2 at the end, loss (\S+)$", printed, re.M)
    assert float(loss) < 0.5
    assert (tmp_path / "survive_a_kill.png").stat().st_size
