"""Hundreds of objects, one after the other, leave nothing behind.

An MPI library supports only a few thousand communicators, and a process a few hundred files. Both limits are those of
each process: more than two ranks reach them no earlier, and only take longer. On a busy machine, each collective call
may take milliseconds, so communicators are counted, instead of creating more than there can be.
"""

import threading

import numpy as np
import pytest
from communicators import number_of_communicators
from fake_model import Model, Param
from mpi4py import MPI

from mn_comm import create_communicator

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
MEAN = (SIZE - 1) / 2

pytestmark = [pytest.mark.rest, pytest.mark.skipif(SIZE > 2, reason="the limits are those of each process")]


def test_any_number_of_reducers_and_communicators():
    create_communicator()  # with the first one, mn-guard starts a thread
    threads = threading.active_count()
    for i in range(400):
        if i == 100:
            before = number_of_communicators()
        comm = create_communicator("hierarchical")
        if i % 10 == 0:
            reducer = comm.gradient_reducer(background=True, sets=1 + i // 10 % 2)
            model = Model(**{f"p{i}": Param(np.zeros(50, "f4"), np.full(50, RANK + i, "f4")) for i in range(2)})
            reduction = reducer.start(model)
            reduction.ready_all()
            reduction.wait()
            for i, param in enumerate(model.params.values()):
                np.testing.assert_array_equal(param.grad, np.full(50, MEAN + i, "f4"))
        comm.split(RANK % 2, RANK)
    assert threading.active_count() <= threads + 1
    assert number_of_communicators() <= before


def test_many_communicators_one_after_another(world):
    comm = create_communicator("hierarchical")
    for i in range(150):
        if i == 20:
            before = number_of_communicators()
        part = comm.split(0, world.rank)
        part.finalize()
    assert number_of_communicators() <= before
    comm.finalize()
    assert world.allreduce(1, op=MPI.SUM) == world.size


def test_splits_with_keys_of_equal_order(world):
    comm = create_communicator("naive", world.Dup())
    one = comm.split(0, comm.rank)
    for i in range(300):
        assert comm.split(0, comm.rank * (i + 1)).mpi_comm == one.mpi_comm


def test_parts_that_are_finalized_give_their_communicators_back(world):
    comm = create_communicator("naive", world.Dup())
    for i in range(150):  # each has several MPI communicators
        if i == 20:
            before = number_of_communicators()
        part = comm.split(0, (world.rank + i) % comm.size)
        assert part.allreduce(np.ones(1))[0] == comm.size
        part.finalize()
    assert len(comm._contexts._splits) == 0
    assert number_of_communicators() <= before


def test_reducers_apart():
    """The communicator of a reducer that no longer exists is used again."""
    comm = create_communicator("flat")
    kept = comm.gradient_reducer(apart=True)
    gone = [comm.gradient_reducer(apart=True)]
    before = len(comm._contexts._others)
    for step in range(1000):
        if RANK == step % SIZE:
            gone[0] = None  # earlier on one rank than on the others
        reducer = comm.gradient_reducer(apart=True)
        gone[0] = None
        if step % 100 == 0:
            for each in (reducer, kept):
                model = Model(p=Param(np.zeros(3, "f4"), np.full(3, RANK + step, "f4")))
                each.average(model)
                np.testing.assert_array_equal(model.params["p"].grad, MEAN + step)
        gone = [reducer]
        if step % 50 == 0:
            gone.append(gone)  # a reference cycle, which only the garbage collector finds
        del reducer
    assert len(comm._contexts._others) <= before + 2
