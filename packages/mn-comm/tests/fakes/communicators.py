"""How many MPI communicators a process has."""

from mpi4py import MPI


def number_of_communicators():
    """Return a number that grows with the MPI communicators of this process; collective.

    New communicators get the numbers of freed ones, or the next number if there is none.
    """
    probes = [MPI.COMM_WORLD.Dup() for _ in range(24)]
    highest = max(probe.py2f() & 0x3FFFFFF for probe in probes)  # the upper bits are MPICH's kind of object
    for probe in reversed(probes):
        probe.Free()
    return highest
