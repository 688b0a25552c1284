import itertools

import numpy as np
import pytest
from fake_model import Model, Param
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mn_comm.gradients.agree import Agreement, first_difference, signature_of
from mn_comm.gradients.bucket import make_buckets, split
from mn_comm.gradients.select import select
from mn_comm.intra import Buffer, shard_bounds


def test_select_sorts_by_name_and_leaves_out_what_has_no_gradient():
    model = Model(b=Param(np.zeros(2), np.ones(2)), c=Param(np.zeros(1)), a=Param(np.zeros(3), np.ones(3)))
    assert [name for name, _ in select(model, zero_fill=False)[0]] == ["/a", "/b"]


def test_select_takes_initialised_parameters_without_a_gradient_if_asked_for():
    model = Model(a=Param(np.ones(2, "f2")), b=Param(None))
    ((name, param),), (like,), (grad,) = select(model, zero_fill=True)
    assert name == "/a"
    assert param.grad is grad is None
    assert like is param.data


shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes)
def test_split_yields_views_that_lie_one_after_another(shapes):
    flat = np.arange(sum(int(np.prod(shape)) for shape in shapes))
    views = list(split(flat, shapes))
    assert [view.shape for view in views] == shapes
    np.testing.assert_array_equal(np.concatenate([view.reshape(-1) for view in views]), flat)
    assert all(view.size == 0 or np.shares_memory(view, flat) for view in views)


@given(shapes, st.booleans(), st.data())
def test_packing_and_viewing_gives_the_gradients_back(shapes, one_each, data):
    dtypes = [data.draw(st.sampled_from(["f2", "f4", "f8"])) for _ in shapes]
    grads = [
        np.asarray(np.random.RandomState(0).uniform(size=shape), dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    params = [(str(i), Param(grad, np.asfortranarray(grad))) for i, grad in enumerate(map(np.asarray, grads))]
    specs = [(param.grad.shape, param.grad.dtype) for _, param in params]
    buckets = make_buckets(specs, range(len(specs)), 0 if one_each else None, None, Buffer.private)
    assert len(buckets) >= len(set(dtypes))
    for bucket in buckets:
        bucket.pack(params)
    for bucket in buckets:
        bucket.view(params)
    for (_, param), grad in zip(params, grads, strict=True):
        np.testing.assert_array_equal(param.grad, grad)
        assert param.grad.dtype == grad.dtype
        assert any(np.shares_memory(param.grad, bucket.buffer.array) for bucket in buckets) or grad.size == 0


def test_gradients_averaged_in_another_dtype_keep_theirs():
    params = [("a", Param(None, np.array([1, 2], "f2")))]
    (bucket,) = make_buckets([((2,), np.dtype("f2"))], [0], None, np.dtype("f4"), Buffer.private)
    assert bucket.buffer.array.dtype == np.float32
    bucket.pack(params)
    np.divide(bucket.buffer.array, 2, out=bucket.buffer.array)
    bucket.view(params)
    assert params[0][1].grad.dtype == np.float16
    np.testing.assert_array_equal(params[0][1].grad, [0.5, 1])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((("a", (1,), "f"),), (), (("a", (1,), "f"), None)),
        ((("a", (1,), "f"), ("b", (1,), "f")), (("b", (1,), "f"),), (("a", (1,), "f"), ("b", (1,), "f"))),
        ((("a", (1,), "f"),), (("a", (2,), "f"),), (("a", (1,), "f"), ("a", (2,), "f"))),
    ],
)
def test_first_difference(one, other, expected):
    assert first_difference(one, other) == expected


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            [("/a", np.zeros((2, 3), "f4"))],
            [],
            "first at /a: shape (2, 3) and dtype float32 on rank 0, missing on rank 1",
        ),
        (
            [("/a", np.zeros(1)), ("/b", np.zeros(1))],
            [("/b", np.zeros(1))],
            "first at /a: shape (1,) and dtype float64 on rank 0, missing on rank 1",
        ),
        ([("/a", None)], [("/a", np.zeros(1))], "first at /a: not initialised on rank 0, shape (1,) and dtype float64"),
    ],
)
def test_the_message_names_the_first_parameter_that_differs(one, other, message):
    explain = Agreement(MPI.COMM_SELF, "bcast_data")._explain
    assert message in str(explain([signature_of(one), signature_of(other)]))


@given(length=st.integers(0, 1000), shards=st.integers(1, 9))
def test_shards_cover_everything_almost_evenly(length, shards):
    bounds = shard_bounds(length, shards)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(bounds))
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_a_missing_gradient_is_packed_as_zeros():
    params = [("a", Param(np.ones(3)))]
    (bucket,) = make_buckets([((3,), np.dtype("f8"))], [0], None, None, Buffer.private)
    bucket.buffer.array.fill(7)
    bucket.pack(params)
    bucket.view(params)
    np.testing.assert_array_equal(params[0][1].grad, np.zeros(3))


F4, F8 = np.dtype("f4"), np.dtype("f8")


@pytest.mark.parametrize(
    ("sizes", "order", "most_bytes", "expected"),
    [
        ([1, 1, 1], [2, 0, 1], None, [[2, 0, 1]]),
        ([1, 1, 1], [2, 0, 1], 8, [[2, 0], [1]]),
        ([9, 1, 1], [0, 1, 2], 8, [[0], [1, 2]]),
        ([1, 1, 1], [0, 1, 2], 0, [[0], [1], [2]]),
        ([], [], None, []),
    ],
)
def test_buckets_in_the_order_given(sizes, order, most_bytes, expected):
    buckets = make_buckets([((n,), F4) for n in sizes], order, most_bytes, None, Buffer.private)
    assert [bucket.members for bucket in buckets] == expected


def test_dtypes_do_not_share_a_bucket():
    specs = [((1,), F4), ((1,), F8), ((1,), F4)]
    assert [b.members for b in make_buckets(specs, [0, 1, 2], None, None, Buffer.private)] == [[0, 2], [1]]
