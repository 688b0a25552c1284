"""Every strategy on several hosts; tests/jobs/test_virtual_cluster.py starts it, with a number of ranks for each."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mn_comm import create_communicator
from mn_compress import Int8, OneBit, PowerSGD, TopK

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "mn-comm" / "tests" / "fakes"))
from fake_model import Model, Param

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RANKS = [int(n) for n in os.environ["RANKS_PER_HOST"].split(",")]
NAMES = ["naive", "flat", "hierarchical", "two_dimensional", "non_cuda_aware"]


def make_model(grads):
    return Model(**{f"p{i}": Param(None, grad) for i, grad in enumerate(grads)})


def test_topology():
    comm = create_communicator("naive")
    host = next(i for i in range(len(RANKS)) if RANK < sum(RANKS[: i + 1]))
    assert (comm.inter_rank, comm.inter_size) == (host, len(RANKS))
    assert (comm.intra_rank, comm.intra_size) == (RANK - sum(RANKS[:host]), RANKS[host])
    part = comm.split(comm.intra_rank, RANK)
    assert part.inter_size == sum(n > comm.intra_rank for n in RANKS)
    part.finalize()
    comm.finalize()


@pytest.mark.parametrize("wire", [None, "float16", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_computes_the_mean(name, wire):
    comm = create_communicator(name, allreduce_grad_dtype=wire)
    shapes = [(0,), (), (7,), (300, 301), (5,), (2, 3, 4)]
    for seed in range(3):
        grads = [
            [np.asarray(np.random.RandomState(10 * seed + rank).uniform(-1, 1, s), "f4") for s in shapes]
            for rank in range(SIZE)
        ]
        expected = [np.mean([each[i].astype("f8") for each in grads], axis=0) for i in range(len(shapes))]
        model = make_model(grads[RANK])
        comm.multi_node_mean_grad(model)
        for param, mean in zip(model.params.values(), expected, strict=True):
            np.testing.assert_allclose(param.grad, mean, rtol=0, atol=2e-3 if wire == "float16" else 5e-7)
            for other in WORLD.allgather(param.grad.tobytes()):
                assert other == param.grad.tobytes()
    comm.finalize()


def test_single_node_refuses_several():
    with pytest.raises(ValueError, match=f"expected all ranks on one node, got {len(RANKS)} nodes"):
        create_communicator("single_node")
    by_host = create_communicator("naive").split(next(i for i in range(len(RANKS)) if RANK < sum(RANKS[: i + 1])), RANK)
    comm = create_communicator("single_node", by_host.mpi_comm)
    model = make_model([np.full(5, comm.rank, "f4")])
    comm.multi_node_mean_grad(model)
    np.testing.assert_array_equal(model.params["p0"].grad, np.full(5, (comm.size - 1) / 2))
    comm.finalize()


def test_in_the_background():
    comm = create_communicator("two_dimensional")
    reducer = comm.gradient_reducer(background=True, bucket_bytes=4000, sets=2)
    under_way = []
    for factor in (1, 2):
        model = make_model([np.full(n, RANK * factor, "f4") for n in (500, 700, 900)])
        under_way.append((model, factor, reducer.start(model)))
        under_way[-1][2].ready_all()
    for model, factor, current in under_way:
        current.wait()
        for param in model.params.values():
            np.testing.assert_allclose(param.grad, factor * (SIZE - 1) / 2)
    comm.finalize()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", ["flat", "hierarchical", "two_dimensional"])
@pytest.mark.parametrize(
    "how", [Int8(), OneBit(block=64), TopK(0.3), PowerSGD(rank=2, start_iter=1, min_compression_rate=1)], ids=repr
)
def test_compression(how, name, background):
    comm = create_communicator(name)
    reducer = comm.gradient_reducer(compression=how, background=background)
    shapes = [(60, 40), (11,), (30, 3, 3)]

    def gradients(rank):
        random = np.random.RandomState(rank)
        return [
            (
                np.sign(random.standard_normal((s[0], *[1] * (len(s) - 1)))) * random.uniform(0.5, 1.5, (1, *s[1:]))
            ).astype("f4")
            for s in shapes
        ]

    total = 0
    for _ in range(30):
        model = make_model(gradients(RANK))
        if background:
            reduction = reducer.start(model)
            reduction.ready_all()
            reduction.wait()
        else:
            reducer.average(model)
        mean = np.concatenate([param.grad.reshape(-1) for param in model.params.values()])
        total = total + mean
    assert len(set(WORLD.allgather(mean.tobytes()))) == 1
    everyones = [np.concatenate([grad.reshape(-1) for grad in gradients(rank)]) for rank in range(SIZE)]
    expected = np.mean(everyones, axis=0)
    assert np.linalg.norm(total / 30 - expected) < 0.2 * np.linalg.norm(expected)
    talks = name == "flat" or comm.intra_rank < (1 if name == "hierarchical" else min(RANKS))
    assert (reducer.compression_report.bytes_sent > 0) == talks
    comm.finalize()
