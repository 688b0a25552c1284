"""Selecting gradients, filling and cutting buckets, and whether arrays can hold means; all without communication."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from fake_model import Model, Param
from hypothesis import given
from hypothesis import strategies as st

from mn_comm.collectives.halving import order_of_ranges
from mn_comm.gradients.agree import select
from mn_comm.gradients.blocks import cut
from mn_comm.gradients.filling import Owners, Ownership, fill_buckets
from mn_comm.gradients.parts import bounds
from mn_comm.gradients.share_size import SHARE_BYTES, ShareSize
from mn_comm.gradients.signature import explain, first_difference
from mn_comm.gradients.strategies import ALL, Strategy
from mn_comm.gradients.targets import Targets


def test_select_sorts_by_name_and_omits_what_has_no_gradient():
    model = Model(b=Param(np.zeros(2), np.ones(2)), c=Param(np.zeros(1)), a=Param(np.zeros(3), np.ones(3)))
    assert [name for name, _ in select(model, zero_fill=False).params] == ["/a", "/b"]


def test_select_takes_initialised_parameters_without_a_gradient_if_asked_for():
    model = Model(b=Param(np.zeros(2)), c=Param(None), a=Param(np.zeros(3), np.ones(3)))
    params, likes, grads = select(model, zero_fill=True)
    assert [name for name, _ in params] == ["/a", "/b"]
    assert [like.shape for like in likes] == [(3,), (2,)]
    assert [grad is None for grad in grads] == [False, True]


class Uninitialised:
    """Like Chainer's parameter before it is initialised and before its gradient was cleared."""

    data = None

    @property
    def grad(self):
        raise RuntimeError("Cannot retrieve Variable.grad.")


def test_an_uninitialised_parameter_that_has_no_gradient_to_ask_for_takes_no_part():
    model = Model(a=Uninitialised(), b=Param(np.zeros(2), np.ones(2)))
    assert [name for name, _ in select(model, zero_fill=True).params] == ["/b"]
    model = Model(a=Uninitialised())
    model.params["a"].__class__.data = np.zeros(3)
    try:
        with pytest.raises(RuntimeError, match="Cannot retrieve"):
            select(model, zero_fill=True)
    finally:
        Uninitialised.data = None


@given(st.integers(0, 100), st.integers(1, 12))
def test_shares_cover_everything_almost_evenly(length, shares):
    points = bounds(length, shares)
    assert (points[0], points[-1], len(points)) == (0, length, shares + 1)
    sizes = [end - begin for begin, end in itertools.pairwise(points)]
    assert max(sizes) - min(sizes) <= 1


specs = st.lists(
    st.tuples(st.lists(st.integers(0, 6), max_size=3).map(tuple), st.sampled_from(["f4", "f8"])), max_size=12
).map(lambda found: [(f"/{i}", shape, np.dtype(dtype)) for i, (shape, dtype) in enumerate(found)])


@given(specs, st.sampled_from([0, 7, 24, 100, None]), st.booleans(), st.randoms(use_true_random=False))
def test_buckets_hold_every_element_once(specs, most_bytes, whole, random):
    order = list(range(len(specs)))
    random.shuffle(order)
    seen = {i: [] for i in order}
    for parts in fill_buckets(specs, order, most_bytes, whole=whole):
        dtype = specs[parts[0].member][2]
        assert all(specs[part.member][2] == dtype for part in parts)
        assert parts[0].begin == 0
        assert all(a.end == b.begin for a, b in itertools.pairwise(parts))
        if most_bytes is not None and not (whole and len(parts) == 1):
            assert parts[-1].end <= max(1, most_bytes // dtype.itemsize)
        for part in parts:
            length = int(np.prod(specs[part.member][1]))
            elements = range(length)[part.within] if part.within is not ... else range(length)
            assert len(elements) == part.end - part.begin > 0
            assert not whole or part.within is ...
            seen[part.member] += elements
    for member, elements in seen.items():
        assert elements == list(range(int(np.prod(specs[member][1]))))


@given(specs, st.lists(st.integers(1, 200), max_size=6))
def test_cutting_a_bucket_keeps_its_elements_in_order(specs, points):
    for parts in fill_buckets(specs, range(len(specs)), None, whole=True):
        length = parts[-1].end
        found = []
        for begin, end, inside in cut(parts, sorted({0, length, *(point for point in points if point < length)})):
            assert (inside[0].begin, inside[-1].end) == (begin, end)
            for part in inside:
                size = int(np.prod(specs[part.member][1]))
                found += [(part.member, i) for i in (range(size) if part.within is ... else range(size)[part.within])]
        assert found == [(p.member, i) for p in parts for i in range(int(np.prod(specs[p.member][1])))]


def test_dtypes_do_not_share_a_bucket_and_order_is_kept():
    specs = [(f"/{i}", (10,), np.dtype(dtype)) for i, dtype in enumerate(["f4", "f8", "f4", "f8", "f4"])]
    found = [[part.member for part in parts] for parts in fill_buckets(specs, [4, 3, 2, 1, 0], 90, whole=True)]
    assert found == [[3], [4, 2], [1], [0]]


def ownership_of(specs, nodes, me, leaders, owners):
    """Return the owners of gradients among ranks that run on these nodes, as one of the ranks sees them."""
    nodes = [list(dict.fromkeys(nodes)).index(node) for node in nodes]
    places = [(node, nodes[:rank].count(node)) for rank, node in enumerate(nodes)]
    topology = SimpleNamespace(
        rank=me, size=len(nodes), inter_rank=places[me][0], intra_rank=places[me][1], intra_size=nodes.count(nodes[me]),
        inter_size=len(set(nodes)), most_intra_size=max(map(nodes.count, nodes)),
        least_intra_size=min(map(nodes.count, nodes)),
    )  # fmt: skip
    ranks = SimpleNamespace(allgather=lambda place: places)
    kind = type("Any", (Strategy,), {"leaders_per_node": leaders})
    strategy = kind(SimpleNamespace(topology=topology, ranks=ranks))
    return Ownership(strategy, Owners(owners), specs), places


@given(
    specs,
    st.lists(st.integers(0, 3), min_size=1, max_size=7),
    st.sampled_from([ALL, 1]),
    st.sampled_from([8, 24, 100]),
    st.booleans(),
    st.data(),
)
def test_buckets_hold_what_has_an_owner_where_it_gets_there(specs, nodes, leaders, most_bytes, whole, data):
    owners = {name: data.draw(st.integers(-1, len(nodes) - 1)) for name, *_ in specs}
    owners = {name: owner for name, owner in owners.items() if owner >= 0}
    order = range(len(specs))
    views = [ownership_of(specs, nodes, me, leaders, owners) for me in range(len(nodes))]
    filled = [list(view.fill(specs, order, most_bytes, whole=whole)) for view, _ in views]
    assert all(other == filled[0] for other in filled)
    seen = {i: [] for i in order if specs[i][0] in owners}
    for parts in filled[0]:
        assert len({specs[part.member][2] for part in parts}) == 1
        assert parts[0].begin == 0
        assert all(a.end == b.begin for a, b in itertools.pairwise(parts))
        for part in parts:
            length = int(np.prod(specs[part.member][1]))
            seen[part.member] += range(length)[part.within] if part.within is not ... else range(length)
        for me, (view, places) in enumerate(views):
            ranges = view.ranges(parts)
            assert [ranges.shares[0], ranges.shares[-1]] == [0, parts[-1].end]
            for part in parts:
                owner = owners[specs[part.member][0]]
                assert ranges.are_kept(part.begin, me) == (owner == me)
            check_destinations(ranges, me, places, parts, specs, owners)
    for member, elements in seen.items():
        assert sorted(elements) == list(range(int(np.prod(specs[member][1]))))


def check_destinations(ranges, me, places, parts, specs, owners):
    """Check that the data that a rank exchanges ends on the node, or rank, that owns it."""
    n_nodes = len({node for node, _ in places})
    shares_memory = len(places) > n_nodes
    leader = places[me][1] if shares_memory else 0
    if (shares_memory and n_nodes == 1) or leader >= len(ranges.shares) - 1:
        return
    begin, end = ranges.shares[leader : leader + 2]
    group_of = {rank: node if shares_memory else rank for rank, (node, _) in enumerate(places)}
    order = order_of_ranges(len(set(group_of.values())))
    in_order = [ranges.destinations[rank] for rank in order]
    assert [0, *(each.stop for each in in_order)] == [*(each.start for each in in_order), end - begin]
    for part in parts:
        if begin <= part.begin < end:
            destination = ranges.destinations[group_of[owners[specs[part.member][0]]]]
            assert destination.start <= part.begin - begin < destination.stop


def targets_of(*grads, flattened=()):
    params = [(f"/{i}", Param(np.zeros(3), grad)) for i, grad in enumerate(grads)]
    specs = [(name, (3,) if p.grad is None else p.grad.shape, np.dtype("f8")) for name, p in params]
    return params, Targets(params, list(grads), specs, flattened)


def test_arrays_that_can_hold_the_mean_are_kept():
    grads = [np.arange(6.0), np.arange(6.0).reshape(2, 3).T, np.arange(12.0)[::2], np.array(3.0), np.zeros((0, 2))]
    params, targets = targets_of(*grads)
    targets.finish()
    assert all(array is grad for array, grad in zip(targets.arrays, grads, strict=True))
    assert all(param.grad is grad for (_, param), grad in zip(params, grads, strict=True))


def test_arrays_that_cannot_are_replaced():
    read_only = np.arange(3.0)
    read_only.flags.writeable = False
    repeated = np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (8, 8), writeable=True)
    grads = [None, read_only, np.broadcast_to(np.arange(3.0), (2, 3)), repeated]
    params, targets = targets_of(*grads)
    for array in targets.arrays:
        array[...] = 7
    targets.finish()
    assert all((param.grad == 7).all() for _, param in params)
    np.testing.assert_array_equal(read_only, np.arange(3.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda base: (base, base),
        lambda base: (base[:6], base[3:]),
        lambda base: (base[3:7], base),
        lambda base: (base[::3], base[::2]),
        lambda base: (base.reshape(3, 4)[:, 1], base.reshape(3, 4)[1]),
        lambda base: (np.frombuffer(base.data)[:4], np.frombuffer(base.data)[3:]),
    ],
)
def test_of_arrays_that_share_memory_one_keeps_it(make):
    one, other = make(np.arange(12.0))
    _, targets = targets_of(one, other)
    assert sum(array is grad for array, grad in zip(targets.arrays, (one, other), strict=True)) == 1
    np.testing.assert_array_equal(targets.arrays[0], one)
    np.testing.assert_array_equal(targets.arrays[1], other)
    assert not np.shares_memory(*targets.arrays)


@pytest.mark.parametrize(
    "make",
    [
        lambda base: (base[:6], base[6:]),
        lambda base: (base[::2], base[1::2]),
        lambda base: (base.reshape(3, 4)[:, 1], base.reshape(3, 4)[:, 2]),
        lambda base: (base[::-1][:6], base[:6]),
    ],
)
def test_views_of_one_array_that_do_not_overlap_are_kept(make):
    one, other = make(np.arange(12.0))
    _, targets = targets_of(one, other)
    assert targets.arrays[0] is one
    assert targets.arrays[1] is other


def test_flattened_ones_are_written_back():
    fortran, plain = np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(6.0).reshape(2, 3)
    params, targets = targets_of(fortran, plain, flattened=(0, 1))
    for array in targets.arrays:
        np.testing.assert_array_equal(array, np.arange(6.0))
        array += 1
    targets.finish()
    assert params[0][1].grad is fortran
    assert params[1][1].grad is plain
    for array in (fortran, plain):
        np.testing.assert_array_equal(array, np.arange(1.0, 7.0).reshape(2, 3))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((("a", (1,), "f4"),), (), (("a", (1,), "f4"), None)),
        ((("a", (1,), "f4"),), (("b", (1,), "f4"),), (("a", (1,), "f4"), ("b", (1,), "f4"))),
        ((("a", (1,), "f4"), ("b", (), "f4")), (("a", (1,), "f4"),), (("b", (), "f4"), None)),
    ],
)
def test_first_difference(one, other, expected):
    assert first_difference(one, other) == expected


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            (("/a", (1,), "f4"),),
            (("/b", (1,), "f4"),),
            "first at /a: shape (1,) and dtype f4 on rank 0, missing on rank 1",
        ),
        (
            (("/b", (1,), "f4"),),
            (("/a", (1,), "f4"), ("/b", (1,), "f4")),
            "first at /a: missing on rank 0, shape (1,) and dtype f4 on rank 1",
        ),
        ((("/a", None, None),), (("/a", (2,), "f4"),), "not initialised on rank 0, shape (2,) and dtype f4 on rank 1"),
        ((("dtype", "f2"),), (("dtype", None),), "the same dtype on every rank, got f2 on rank 0 and None on rank 1"),
        ((("/a", (1,), "f4"),), (("failure", "TypeError", "bad"),), "on rank 1: bad"),
    ],
)
def test_the_message_names_the_first_difference(one, other, message):
    assert message in str(explain([("multi_node_mean_grad", one), ("multi_node_mean_grad", other)]))


def run(size, seconds, waited=lambda share: 0.0, times=60):
    used = []
    for _ in range(times):
        size.used = size.proposal
        used.append(size.share_bytes)
        size.record(seconds(used[-1]), waited(used[-1]))
    return used


def test_both_sizes_are_tried_in_the_first_averages_and_the_faster_one_is_kept():
    small, large = SHARE_BYTES
    for slow, fast in ((small, large), (large, small)):
        used = run(ShareSize(), lambda share, slow=slow: 34.0 if share == slow else 12.0)
        assert used[:4].count(small) == used[:4].count(large) == 2
        assert used[4:30] == [fast] * 26
    # The first average with each size takes longer, and says nothing.
    first = iter([9.0, 9.0])
    used = run(ShareSize(), lambda share: next(first, 2.0 if share == small else 3.0))
    assert used[4:] == [small] * 56


def test_when_averages_become_slower_the_other_size_is_tried_although_nobody_waits():
    small, large = SHARE_BYTES
    size = ShareSize()
    assert run(size, lambda share: 1.0 if share == small else 2.0)[4:] == [small] * 56
    used = run(size, lambda share: 6.0 if share == small else 2.0)
    assert large in used[:8]
    assert used[-40:].count(large) >= 35


def test_where_waiting_dominates_the_larger_shares_are_tried_and_kept_if_they_are_better():
    small, large = SHARE_BYTES
    size = ShareSize()
    used = run(size, lambda share: 10.0 if share == small else 3.0, lambda share: 8.0)
    assert used[0] == small
    assert used.index(large) < 4
    assert used[-25:].count(large) >= 23
    # When the cores are free again, small shares are soon used again.
    used = run(size, lambda share: 1.0 if share == small else 2.0, times=150)
    assert used[-20:].count(small) == 20


def test_if_the_larger_shares_are_no_better_they_are_seldom_tried():
    used = run(ShareSize(), lambda share: 5.0, lambda share: 4.0, times=90)
    assert 5 <= used[4:].count(SHARE_BYTES[1]) <= 12
