"""The examples in which a process is killed: the training goes on, without it or with a spare."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

FEATURES = Path(__file__).parents[2] / "examples/features"

pytest.importorskip("sklearn")


@pytest.mark.parametrize("victim", [1, 0])
def test_the_others_go_on(survivors, tmp_path, victim):
    printed = survivors(FEATURES / "survive_a_kill.py", "--epochs", 4, "--victim", victim)
    assert re.search(r"^step \d+: 3 processes become 2$", printed, re.M)
    (loss,) = re.findall(r"^101 steps, 3 processes at first, 2 at the end, loss (\S+)$", printed, re.M)
    assert float(loss) < 0.5
    assert (tmp_path / "survive_a_kill.png").stat().st_size


@pytest.mark.parametrize("victim", [1, 0])
def test_a_spare_takes_the_place(survivors, tmp_path, monkeypatch, victim):
    monkeypatch.setenv("CHAINERMN_SPARES", "1")
    printed = survivors(FEATURES / "spare.py", "--victim", victim)
    assert "the spare has trained since step 61, as process 1" in printed
    (loss,) = re.findall(r"^processes: 2 at first, 1 for a moment, 2 at the end; loss (\S+)$", printed, re.M)
    assert float(loss) < 0.5
    assert (tmp_path / "spare.png").stat().st_size
