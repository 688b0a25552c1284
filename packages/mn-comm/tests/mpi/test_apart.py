"""Averaging of data other than gradients: separately, and in its own dtype; and communicators that refuse to."""

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI

from mn_comm import Future, create_communicator
from mn_comm.building_blocks import Worker, register_synchronizer, synchronize_replicas

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
MEAN = (SIZE - 1) / 2


def of(array):
    return Param(array, array)


@pytest.mark.parametrize("name", ["naive", "flat", "hierarchical", "two_dimensional"])
def test_other_threads_may_communicate_meanwhile(name):
    comm = create_communicator(name)
    reducers = [comm.gradient_reducer(apart=True) for _ in range(2)]
    overlapped = comm.gradient_reducer(background=True)
    workers = [Worker(), Worker()]
    models = [Model(p=of(np.zeros(20_000, "f4"))) for _ in range(4)]

    def average(i):
        for step in range(20):
            models[i].params["p"].grad[...] = RANK * (i + 1) + step
            reducers[i].average(models[i])
            assert (models[i].params["p"].grad == MEAN * (i + 1) + step).all()

    done = [Future(lambda i=i: average(i), worker) for i, worker in enumerate(workers)]
    for step in range(20):
        for model in models[2:]:
            model.params["p"].grad[...] = RANK + step
        reduction = overlapped.start(models[2])
        reduction.ready_all()
        comm.multi_node_mean_grad(models[3])
        reduction.wait()
        for model in models[2:]:
            np.testing.assert_array_equal(model.params["p"].grad, MEAN + step)
    for each in done:
        each.wait()
    for worker in workers:
        worker.close()


def test_own_dtype():
    comm = create_communicator("flat", allreduce_grad_dtype="float16")
    values = {}
    for own_dtype in (False, True):
        model = Model(p=of(np.full(3, 1 / 3 + RANK, "f4")))
        comm.gradient_reducer(own_dtype=own_dtype).average(model)
        values[own_dtype] = model.params["p"].grad[0]
    np.testing.assert_allclose(values[True], MEAN + 1 / 3, rtol=1e-6)
    assert values[False] != values[True]


def test_bad_options_raise_on_all_ranks():
    comm = create_communicator("naive")
    with pytest.raises(ValueError, match="one of background and apart, got both"):
        comm.gradient_reducer(background=True, apart=True)
    if SIZE > 1:
        with pytest.raises(ValueError, match="same background, own_dtype, apart, use of comm_hook"):
            comm.gradient_reducer(own_dtype=RANK == 0)


class Owner:
    def __init__(self):
        self.calls = 0

    def synchronize(self):
        self.calls += 1


def test_the_last_to_own_a_parameter_is_asked_once():
    first, second = Owner(), Owner()
    model = Model(a=of(np.zeros(1)), b=of(np.zeros(1)), c=of(np.zeros(1)))
    register_synchronizer(first, model.params.values())
    synchronize_replicas(model)
    assert (first.calls, second.calls) == (1, 0)
    register_synchronizer(second, [model.params["b"]])
    synchronize_replicas(model)
    assert (first.calls, second.calls) == (2, 1)
    synchronize_replicas(Model(b=model.params["b"]))
    assert (first.calls, second.calls) == (2, 2)
    del first
    synchronize_replicas(model)
    assert second.calls == 3
    synchronize_replicas(Model(d=of(np.zeros(1))))


def test_parameters_that_are_gone_are_forgotten():
    from mn_comm.basis import replicas

    known, owner = len(replicas._synchronizers), Owner()
    register_synchronizer(owner, [of(np.zeros(1)) for _ in range(100)])
    assert len(replicas._synchronizers) <= known
