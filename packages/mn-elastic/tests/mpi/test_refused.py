"""A job that cannot survive a loss has no elastic communicator."""

import pytest

from mn_comm import create_communicator


def test_an_elastic_one_is_refused_where_no_rank_may_die(world):
    with pytest.raises(RuntimeError, match=r"elastic=True: expected .*mpiexec --with-ft ulfm"):
        create_communicator("naive", elastic=True)
