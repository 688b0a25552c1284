"""A host of a training is lost, with MPICH: `chainermn elastic` starts it again, from what memory holds."""

import pytest


@pytest.fixture(scope="module")
def lost_hosts(virtual_cluster):
    import lost_hosts  # it lies beside tools/cluster.py

    return lost_hosts


@pytest.mark.parametrize(
    ("loss", "ranks"),
    # Ranks of MPICH do not need the daemon that has started them: they go on.
    [("daemon", 4), ("link", 2), ("machine", 2)],
)
def test_the_training_comes_to_its_end(lost_hosts, loss, ranks):
    outcome = lost_hosts.lose(loss, patience=65)
    assert (outcome.status, outcome.ranks) == (0, ranks), outcome.said
    assert outcome.steps_lost <= lost_hosts.PERIOD, outcome.said
    assert outcome.seconds < 30
    # The keeper on the other side of the cut ends them; without it they would wait for ever.
    assert outcome.seconds_of_the_lost < 15
