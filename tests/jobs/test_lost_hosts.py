"""A host of a training is lost, with MPICH: `chainermn elastic` restarts the job, from the state in memory."""

import pytest


@pytest.fixture(scope="module")
def lost_hosts(virtual_cluster):
    import lost_hosts  # it is beside tools/cluster.py

    return lost_hosts


@pytest.mark.parametrize(
    ("loss", "ranks"),
    # Ranks of MPICH do not need the daemon that has started them: they continue.
    [("daemon", 4), ("link", 2), ("machine", 2)],
)
def test_the_training_comes_to_its_end(lost_hosts, loss, ranks):
    outcome = lost_hosts.lose(loss, patience=65)
    assert (outcome.status, outcome.ranks) == (0, ranks), outcome.said
    assert outcome.steps_lost <= lost_hosts.PERIOD, outcome.said
    assert outcome.seconds < 30
    # The keeper on the lost host ends its ranks; without the keeper, they would wait forever.
    assert outcome.seconds_of_the_lost < 15
