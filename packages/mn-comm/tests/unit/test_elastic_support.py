"""Which jobs can continue after a rank has died."""

import pytest

from mn_comm import Change
from mn_comm.elastic.support import problem_of

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
    assert str(change) == "lost ranks 1, 3 of 5, 3 go on"
    assert str(Change(1, (0,), (1,), 0, 0.1)) == "lost rank 0 of 2, 1 go on"
