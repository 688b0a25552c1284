"""Sharded updates on several hosts: how many bytes they send to each other, and that there is no other difference."""

import time
from pathlib import Path

import mn_optim  # isort: skip - before Chainer
import chainer
import numpy as np
import pytest

from mn_comm import create_communicator

SHAPES = [(500, 500)] * 8


def sent():
    """Return how many bytes this host has sent to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if "eth0:" in line)


def train(comm, model, steps, optimizer):
    for step in range(steps):
        random = np.random.RandomState(100 * step + comm.rank)
        model.cleargrads()
        for param in model.params():
            param.grad = random.uniform(-1, 1, param.shape).astype("f4")
        optimizer.update()


@pytest.mark.parametrize("name", ["flat", "hierarchical", "two_dimensional"])
def test_an_update_sends_no_more_than_an_average(name):
    comm = create_communicator(name)
    bytes_sent, parameters = {}, {}
    for sharded in (False, True):
        model = chainer.Link()
        with model.init_scope():
            for i, shape in enumerate(SHAPES):
                setattr(model, f"p{i}", chainer.Parameter(np.ones(shape, "f4")))
        actual = chainer.optimizers.MomentumSGD(0.1)
        when = mn_optim.Sharded() if sharded else mn_optim.AfterBackward()
        optimizer = mn_optim.MultiNodeOptimizer(actual, comm, when).setup(model)
        train(comm, model, 3, optimizer)
        comm.barrier()
        time.sleep(0.2)  # remaining messages of MPI
        before = sent()
        comm.barrier()
        train(comm, model, 4, optimizer)
        comm.barrier()
        time.sleep(0.2)
        bytes_sent[sharded] = np.array(comm.allgather_obj(sent() - before))
        parameters[sharded] = np.concatenate([param.data.ravel() for param in model.params()])
    if name == "flat" and comm.size > 2:  # MPI adds up more than two summands in its own order
        np.testing.assert_allclose(parameters[True], parameters[False], rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(parameters[True], parameters[False])
    assert bytes_sent[False].max() > 4 * 8_000_000
    if name != "flat":  # among whose ranks some on the same host send to each other
        # In the last round of gathering parameters, chunks of ranks that share a node are sent whole, full or not.
        unused = 0 if len(set(comm.allgather_obj(comm.intra_size))) == 1 else 4 * 8_000_000 / comm.size
        assert (bytes_sent[True] < 1.05 * bytes_sent[False].max() + unused).all()
    comm.finalize()
