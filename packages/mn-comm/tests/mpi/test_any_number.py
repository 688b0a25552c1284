"""Thousands of objects, one after the other."""

import threading

import numpy as np
from fake_model import Model, Param
from mpi4py import MPI

from mn_comm import create_communicator

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def test_any_number_of_reducers_and_communicators():
    """An MPI library supports only a few thousand communicators, and a process a few hundred files."""
    threads = threading.active_count()
    for i in range(3000):
        comm = create_communicator("hierarchical")
        if i % 30 == 0:
            reducer = comm.gradient_reducer(background=True, sets=1 + i % 2)
            model = Model(**{f"p{i}": Param(np.zeros(50, "f4"), np.full(50, RANK + i, "f4")) for i in range(2)})
            reduction = reducer.start(model)
            reduction.ready_all()
            reduction.wait()
            for i, param in enumerate(model.params.values()):
                np.testing.assert_array_equal(param.grad, np.full(50, (SIZE - 1) / 2 + i, "f4"))
        comm.split(RANK % 2, RANK)
    assert threading.active_count() <= threads + 1
