"""The arithmetic of the page on 10,000 ranks; these tests measure nothing."""

import dataclasses
import importlib
import itertools
import re

import pytest

SIZES = (2, 16, 128, 1_000, 10_000)


@pytest.fixture(scope="module")
def model(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "benchmarks"))
        yield importlib.import_module("recovery_model")


@pytest.fixture
def measured(model):
    of_one_rank = {"name": 2e-7, "place": 1.5e-7, "lost": 1e-7, "deal": 2e-8, "deal_again": 4e-7}
    return model.Measured(notice=0.02, vote=2e-6, beat=1e-5, restart=4.0, **of_one_rank)


def test_two_ranks_of_a_node_are_what_was_measured(model, measured):
    parts = model.parts(2, measured, model.Assumed())
    assert parts["notice"] == measured.notice
    assert parts["votes"] == pytest.approx(8 * measured.vote)
    assert sum(parts.values()) - parts["the step again"] == pytest.approx(0.02, rel=0.01)


def test_nothing_becomes_less_with_more_ranks(model, measured):
    for function in (model.parts, model.per_step, model.connections, model.lost_time):
        for fewer, more in itertools.pairwise(SIZES):
            found, beyond = function(fewer, measured, model.Assumed()), function(more, measured, model.Assumed())
            assert all(found[name] <= beyond[name] for name in found), (function.__name__, fewer)


def test_votes_grow_with_the_logarithm_and_lists_with_the_number(model, measured):
    nodes = [model.parts(8 * 2**power, measured, model.Assumed()) for power in range(4, 12)]
    for name in ("votes", "communicators"):
        steps = [more[name] - fewer[name] for fewer, more in itertools.pairwise(nodes)]
        assert steps == pytest.approx([steps[0]] * len(steps))
    for name in ("where the ranks are", "deal again"):
        assert nodes[-1][name] == pytest.approx(2 * nodes[-2][name])


def test_a_network_that_takes_no_time_leaves_what_ranks_do_themselves(model, measured):
    assumed = dataclasses.replace(model.Assumed(), latency=0.0, rate=float("inf"))
    parts = model.parts(10_000, measured, assumed)
    assert parts["notice"] == measured.notice
    assert parts["votes"] == pytest.approx(8 * 3 * measured.vote)
    assert parts["where the ranks are"] == pytest.approx(10_000 * 4.5e-7)


def test_a_keeper_is_one_connection_for_each_node(model, measured):
    found = model.connections(10_000, measured, model.Assumed())
    assert (found["connections"], found["messages a second"]) == (1250, 6250)
    assert found["part of a core"] == pytest.approx(2.5 * 1250 * 1e-5)


def test_time_is_lost_in_proportion_to_how_often_a_rank_fails(model, measured):
    assumed = model.Assumed()
    one, ten = (model.lost_time(size, measured, assumed) for size in (1_000, 10_000))
    for name in ("restart from memory", "restart from checkpoints"):
        assert ten[name] == pytest.approx(10 * one[name], rel=0.2)
    assert ten["in place"] < ten["restart from memory"] < ten["restart from checkpoints"] < 1
    hopeless = dataclasses.replace(assumed, hours_of_a_rank=0.0)
    assert set(model.lost_time(16, measured, hopeless).values()) == {1.0}


def test_the_page_shows_what_the_model_makes_of_what_was_measured(model, root):
    shown = (root / "docs/recovery-model.md").read_text()
    found = re.search(r"^\| \| 2 \|.*?(?=^$)", shown, re.M | re.S)
    assert found[0].rstrip() == model.table(model.read(), model.Assumed())
