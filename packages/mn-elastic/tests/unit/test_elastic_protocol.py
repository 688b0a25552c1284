"""The protocol of elastic communicators, in all interleavings of three ranks and two deaths."""

import pytest
from model_of_votes import Model


def test_no_interleaving_hangs_or_lets_ranks_differ():
    count, wrong = Model().explore()
    assert wrong == set()
    assert count > 10_000  # the exploration is not trivial


def test_two_steps_and_one_death():
    _, wrong = Model(steps=2, deaths=1).explore()
    assert wrong == set()


@pytest.mark.parametrize(
    ("fault", "consequence"),
    [
        ({"votes_on_derived": False}, "hang"),
        ({"revokes": False}, "hang"),
        ({"votes_on_steps": False}, "the same step was taken in two families"),
    ],
)
def test_what_each_part_is_there_for(fault, consequence):
    _, wrong = Model(deaths=1, **fault).explore()
    assert consequence in wrong
