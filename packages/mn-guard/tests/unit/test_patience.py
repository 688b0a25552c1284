"""All times of patience are in one place, and one variable multiplies them."""

import pytest

from mn_guard import patience


@pytest.mark.parametrize(("text", "number"), [(None, 1.0), ("0.1", 0.1), ("2", 2.0)])
def test_the_factor(monkeypatch, text, number):
    monkeypatch.delenv("CHAINERMN_PATIENCE", raising=False)
    if text is not None:
        monkeypatch.setenv("CHAINERMN_PATIENCE", text)
    assert patience.factor() == number


@pytest.mark.parametrize("text", ["", "0", "-1", "inf", "nan", "long"])
def test_what_is_no_factor(monkeypatch, text):
    monkeypatch.setenv("CHAINERMN_PATIENCE", text)
    with pytest.raises(ValueError, match="expected a number above 0 in CHAINERMN_PATIENCE, got"):
        patience.factor()


def test_rank_0_has_ended_the_job_before_the_others_do():
    assert patience.CTRL_C < patience.OTHERS_AFTER_CTRL_C
