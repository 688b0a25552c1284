"""Which jobs can continue after a rank has died."""

import pytest

from mn_comm import Change
from mn_comm.registry import refuse_spares
from mn_elastic.support import is_minority, n_spares, problem_of

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI root@build Distribution, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: someday"


def test_open_mpi_with_fault_tolerance_can():
    assert problem_of(OPEN_MPI, {"OMPI_MCA_mpi_ft_enable": "1"}) is None


@pytest.mark.parametrize("environ", [{}, {"OMPI_MCA_mpi_ft_enable": "0"}])
def test_without_fault_tolerance_the_cure_is_named(environ):
    assert "mpiexec --with-ft ulfm" in problem_of(OPEN_MPI, environ)


def test_another_library_is_named():
    problem = problem_of(MPICH, {"OMPI_MCA_mpi_ft_enable": "1"})
    assert "got MPICH Version: 5.0.2:" in problem
    assert "mpiexec --with-ft ulfm" in problem


def test_a_change_tells_who_is_who():
    change = Change(generation=1, lost=(1, 3), survivors=(0, 2, 4), rank=1, seconds=0.1)
    assert (change.size, change.old_size, change.old_rank) == (3, 5, 2)
    assert str(change) == "lost ranks 1, 3 of 5, 3 continue"
    assert str(Change(1, (0,), (1,), 0, 0.1)) == "lost rank 0 of 2, 1 continue"
    aside = Change(1, (1,), (0, 2), 0, 0.1, set_aside=(3, 4))
    assert (aside.size, aside.old_size) == (2, 5)
    assert str(aside) == "lost rank 1, ranks 3, 4 of 5 set aside as spares, 2 continue"
    grown = Change(1, (), (0, 1), 1, 0.1, newcomers=("process 3 (a)",))
    assert (grown.size, grown.old_size, grown.old_rank) == (3, 2, 1)
    assert str(grown) == "process 3 (a) joined 2 ranks, 3 continue"
    assert str(Change(1, (), (0,), 1, 0.1, newcomers=("b",))) == "b joined 1 rank, 2 continue"


def test_at_least_one_trains():
    assert [n_spares(3, text) for text in ("", "0", "2")] == [0, 0, 2]
    for text in ("3", "-1", "1.5"):
        with pytest.raises(ValueError, match=r"expected 0 to 2 for CHAINERMN_SPARES, in a job of 3 processes; got"):
            n_spares(3, text)


def test_ranks_that_cannot_go_on_have_no_spares():
    refuse_spares({})
    refuse_spares({"CHAINERMN_SPARES": "0"})
    with pytest.raises(ValueError, match=r"elastic=True\) with CHAINERMN_SPARES=1, got elastic=False"):
        refuse_spares({"CHAINERMN_SPARES": "1"})


def test_more_than_half_go_on_if_the_silent_are_taken_for_dead():
    detector = {"OMPI_MCA_mpi_ft_detector": "true"}
    assert [is_minority(left, 4, detector) for left in (3, 2, 1)] == [False, True, True]
    assert not is_minority(2, 3, detector)
    assert not is_minority(1, 4, {})
