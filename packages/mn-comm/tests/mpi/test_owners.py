"""Means that are sent only to the rank that owns them: equal to those that all ranks get without owners.

Up to two summands between nodes, and in half precision, they have the same bits; otherwise, MPI adds in its own order.
"""

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI

from mn_comm import create_communicator
from mn_comm.building_blocks import Owners, Ranks
from mn_comm.collectives import mean_in_place, mean_to_each, order_of_ranges

pytestmark = pytest.mark.sizes(3)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
NAMES = ["naive", "flat", "hierarchical", "two_dimensional"]
SHAPES = [(6, 10), (3,), (), (0,), (2, 0), (1,), (130,), (4, 5, 2), (7,), (11, 3), (90,)]
several = pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
OWNERS = {
    "in turns": {f"/p{i:02}": i % SIZE for i in range(len(SHAPES))},
    "all of one": {f"/p{i:02}": SIZE - 1 for i in range(len(SHAPES))},
    "some of nobody": {f"/p{i:02}": i * 7 % SIZE for i in range(0, len(SHAPES), 2)},
    "none": {},
}


def gradient(seed, shape, dtype, rank=RANK):
    return np.asarray(np.random.RandomState(seed * 100 + rank).uniform(-1, 1, shape), dtype)


def model_of(dtype, step=0):
    # Half precision among others: buckets of two dtypes.
    dtypes = [dtype if i != 6 else "f8" for i in range(len(SHAPES))]
    grads = [gradient(i + step, shape, dtypes[i]) for i, shape in enumerate(SHAPES)]
    grads[0] = np.asfortranarray(grads[0])
    return Model(**{f"p{i:02}": Param(np.zeros(grad.shape), grad) for i, grad in enumerate(grads)})


def check(found, expected, owners, groups):
    for name, param in found.namedparams():
        if owners.get(name, RANK) == RANK:
            mean = dict(expected.namedparams())[name].grad
            assert param.grad.dtype == mean.dtype
            if groups <= 2:
                assert param.grad.tobytes() == mean.tobytes(), name
            else:
                np.testing.assert_allclose(param.grad, mean, rtol=2e-6 if mean.itemsize > 2 else 2e-3, atol=1e-7)


@pytest.mark.parametrize("owned", OWNERS)
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_owner_has_what_all_would_have(name, nodes, owned, on_nodes, many_blocks):
    if nodes > SIZE:
        pytest.skip("fewer ranks than nodes")
    for wire in (None, "float16"):
        comm = on_nodes(name, nodes, allreduce_grad_dtype=wire)
        owners = Owners(OWNERS[owned])
        for dtype in ("f4", "f2") if wire is None else ("f4",):
            kept = Model(**{f"p{i:02}": Param(np.zeros(shape), None) for i, shape in enumerate(SHAPES)})
            for step in range(3):
                expected, found = model_of(dtype, step), model_of(dtype, step)
                for param, other in zip(kept.params.values(), found.params.values(), strict=True):
                    param.grad = other.grad
                comm.multi_node_mean_grad(expected)
                comm.mean_grad_reducer(kept).average(kept, owners=owners)
                check(kept, expected, owners.of, SIZE if name in ("naive", "flat") else nodes)
                assert all(a.grad is b.grad for a, b in zip(kept.params.values(), found.params.values(), strict=True))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("owned", OWNERS)
def test_in_the_background(owned, nodes, on_nodes, many_blocks):
    if nodes > SIZE:
        pytest.skip("fewer ranks than nodes")
    comm = on_nodes("two_dimensional", nodes)
    reducers = [comm.gradient_reducer(background=True, bucket_bytes=200, sets=2) for _ in range(2)]
    order = [f"/p{i:02}" for i in reversed(range(len(SHAPES)))]
    for step in range(3):
        under_way = []
        for reducer, owners in zip(reducers, (None, Owners(OWNERS[owned])), strict=True):
            model = model_of("f4", step)
            reduction = reducer.start(model, order=order, owners=owners)
            for name in order:
                reduction.ready(name)
            under_way.append((model, reduction))
        for _, reduction in under_way:
            reduction.wait()
        check(under_way[1][0], under_way[0][0], OWNERS[owned], nodes)


@several
def test_ranks_that_have_other_owners_in_mind():
    comm = create_communicator("two_dimensional")
    model = model_of("f4")
    owners = Owners({"/p00": 0 if RANK else 1}, "a hook" if RANK == SIZE - 1 else "no hook")
    with pytest.raises(ValueError, match="expected the same owners of means on every rank, got no hook on rank 0 and"):
        comm.mean_grad_reducer(model).average(model, owners=owners)
    with pytest.raises(ValueError, match="got none on rank 0 and no hook on rank"):
        comm.mean_grad_reducer(model).average(model, owners=Owners({}, "no hook") if RANK else None)
    comm.mean_grad_reducer(model).average(model, owners=Owners({"/p00": 0}))


def test_what_a_hook_returns_is_for_all():
    comm = create_communicator("two_dimensional")
    assert comm.gradient_reducer().can_leave_to_owners
    assert not comm.gradient_reducer(comm_hook=lambda bucket: bucket.average()).can_leave_to_owners
    assert not create_communicator("dummy").gradient_reducer().can_leave_to_owners


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("length", [0, 1, 5, 1000, 300_001])
def test_a_mean_does_not_depend_on_where_it_lies_or_who_has_it(length, dtype):
    ranks = Ranks(WORLD.Dup())
    summands = [gradient(3, length, dtype, rank) for rank in range(SIZE)]
    everywhere = summands[RANK].copy()
    mean_in_place(ranks, everywhere)
    order_is_own = dtype == "f2" or SIZE <= 2  # otherwise MPI's order applies
    np.testing.assert_allclose(everywhere, np.mean(np.float64(summands), 0), atol=2e-3 if dtype == "f2" else 1e-6)
    assert set(WORLD.allgather(everywhere.tobytes())) == {everywhere.tobytes()}
    backwards = summands[RANK][::-1].copy()
    mean_in_place(ranks, backwards)
    assert backwards[::-1].tobytes() == everywhere.tobytes() or not order_is_own
    owned, known = np.zeros(length, dtype), np.zeros(length, bool)
    random, order = np.random.RandomState(length), order_of_ranges(SIZE)
    for _ in range(3):
        bounds = [0, *sorted(random.randint(0, length + 1, SIZE - 1)), length]
        here = summands[RANK].copy()
        ranges = dict(zip(order, map(slice, bounds, bounds[1:]), strict=False))
        mean_to_each(ranks, here, [ranges[rank] for rank in range(SIZE)])
        mine = ranges[RANK]
        np.testing.assert_allclose(here[mine], everywhere[mine], rtol=2e-6, atol=1e-7)
        assert here[mine].tobytes() == everywhere[mine].tobytes() or not order_is_own
        again = known[mine]
        assert here[mine][again].tobytes() == owned[mine][again].tobytes()
        owned[mine], known[mine] = here[mine], True
    ranks.Free()
