"""A host of a training is lost, with MPICH: `chainermn elastic` restarts the job, from the state in memory."""

import pytest

pytestmark = pytest.mark.rest


@pytest.mark.parametrize(
    ("loss", "ranks"),
    # Ranks of MPICH do not need the daemon that has started them: they continue.
    [("daemon", 4), ("link", 2), ("machine", 2)],
)
def test_the_training_comes_to_its_end(check_lost_host, loss, ranks):
    check_lost_host(loss, ranks)
