"""Arrays on devices, with stand-ins for CuPy and NCCL: how they are transferred, and that they arrive."""

import gc
import os

import numpy as np
import pytest
from fake_model import Model, Param
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mn_comm import Future, create_communicator
from mn_comm.building_blocks import Worker
from mn_comm.device.nccl_ranks import nccl_ranks_of

pytestmark = pytest.mark.sizes(1, 4)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
NAMES = ["naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware", "pure_nccl"]
MEAN = np.full(3, (SIZE - 1) / 2, "f4")

several = pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")


@pytest.fixture(scope="module")
def cupy(fake_cupy):
    """CuPy's stand-in, with another device for each rank."""
    fake_cupy.cuda.Device(RANK % fake_cupy.DEVICES).use()
    return fake_cupy


@pytest.fixture(scope="module")
def comms(cupy):
    made = {name: create_communicator(name) for name in NAMES}
    yield made
    for comm in made.values():
        comm.finalize()


@pytest.fixture
def make(cupy):
    """Return a function that makes communicators, finalized at the end."""
    made = []

    def make(*args, **kwargs):
        made.append(create_communicator(*args, **kwargs))
        return made[-1]

    yield make
    for comm in made:
        comm.finalize()


def on_device(cupy, array, layout="c"):
    array = np.array(array)
    if layout == "strided" and array.ndim:
        wide = cupy.asarray(np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype))
        wide[..., ::2] = cupy.asarray(array)
        return wide[..., ::2]
    return cupy.asarray(np.asarray(array, order="F" if layout == "fortran" else "C"))


def random(shape, dtype, rank, seed):
    return np.asarray(np.random.RandomState(seed * 100 + rank).uniform(-1, 1, shape), dtype)


def check_means(model, grads, wire=None):
    for key, each in grads.items():
        actual = model.params[key].grad.get()
        expected = np.mean([np.asarray(g, "f8") for g in each], axis=0)
        assert actual.dtype == each[0].dtype
        assert actual.shape == each[0].shape
        eps = max(np.finfo(dtype).eps for dtype in (actual.dtype, wire or actual.dtype))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=SIZE * eps)
        for other in WORLD.allgather(actual.tobytes()):
            assert other == actual.tobytes()


parameters = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from(["f2", "f4", "f8"]),
        st.sampled_from(["c", "fortran", "strided"]),
    ),
    max_size=8,
)


@pytest.mark.parametrize("name", NAMES)
@given(parameters, st.booleans())
def test_every_strategy_computes_the_mean(cupy, comms, name, parameters, batched):
    comms[name].set_config("batched_copy", batched)
    grads = {
        f"p{i}": [random(shape, dtype, rank, i) for rank in range(SIZE)]
        for i, (shape, dtype, _) in enumerate(parameters)
    }
    model = Model(
        **{
            key: Param(cupy.asarray(np.zeros_like(each[0])), on_device(cupy, each[RANK], parameters[i][2]))
            for i, (key, each) in enumerate(grads.items())
        }
    )
    comms[name].multi_node_mean_grad(model)
    check_means(model, grads)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional", "pure_nccl", "flat", "non_cuda_aware"])
def test_several_nodes(cupy, on_nodes, name, count):
    if count > SIZE:
        pytest.skip("fewer ranks than nodes")
    comm = on_nodes(name, count)
    assert comm.inter_size == count
    shapes = {"a": (7, 3), "b": (1,), "c": (), "d": (0,), "e": (101,)}
    for step in range(3):
        grads = {key: [random(shape, "f4", rank, step) for rank in range(SIZE)] for key, shape in shapes.items()}
        model = Model(**{key: Param(None, on_device(cupy, each[RANK])) for key, each in grads.items()})
        comm.multi_node_mean_grad(model)
        check_means(model, grads)


@pytest.mark.parametrize("wire", ["f2", "f4", "f8"])
@pytest.mark.parametrize("name", NAMES)
def test_wire_dtypes(cupy, make, name, wire):
    comm = make(name, allreduce_grad_dtype=wire)
    grads = {
        f"{dtype}{i}": [random((5, i), dtype, rank, i) for rank in range(SIZE)]
        for i in range(3)
        for dtype in ("f2", "f4", "f8")
    }
    model = Model(**{key: Param(None, on_device(cupy, each[RANK])) for key, each in grads.items()})
    comm.multi_node_mean_grad(model)
    check_means(model, grads, wire)


@pytest.mark.parametrize(("batched", "launches"), [(True, 1), (False, 3)])
def test_one_launch_for_all_parameters_or_one_each(cupy, make, batched, launches):
    comm = make("flat")
    comm.set_config("batched_copy", not batched)
    model = Model(**{name: Param(None, on_device(cupy, np.full(4, RANK, "f4"))) for name in "abc"})
    comm.multi_node_mean_grad(model)
    comm.set_config("batched_copy", batched)
    counts = []
    for _ in range(2):
        del cupy.calls[:]
        comm.multi_node_mean_grad(model)
        counts.append([cupy.calls.count(name) for name in ("pack", "unpack", "set")])
    # Apart from the buffer, each launch needs a table, once: the gradients are not copied.
    staged = int(SIZE > 1)
    assert counts == [[launches, launches, staged + launches], [launches, launches, staged]]


@pytest.mark.parametrize("layout", ["c", "fortran", "strided"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_keep_their_arrays_and_may_be_missing_or_shared(cupy, comms, name, layout):
    grad = on_device(cupy, np.full((2, 3), RANK, "f4"), layout)
    zeros = [on_device(cupy, np.zeros((2, 3), "f4")) for _ in "abc"]
    model = Model(a=Param(zeros[0], grad), b=Param(zeros[1]), c=Param(None), d=Param(zeros[2]))
    for value in range(3):
        grad[...] = cupy.asarray(np.full((2, 3), RANK + value, "f4"))
        model.params["d"].grad = model.params["a"].grad if RANK == 0 else on_device(cupy, np.full((2, 3), 5, "f4"))
        comms[name].multi_node_mean_grad(model, zero_fill=True)
        assert model.params["a"].grad is grad
        np.testing.assert_allclose(grad.get(), np.full((2, 3), MEAN[0] + value))
        np.testing.assert_allclose(model.params["b"].grad.get(), np.zeros((2, 3)))
        assert model.params["c"].grad is None
        shared = (value + 5 * (SIZE - 1)) / SIZE
        np.testing.assert_allclose(model.params["d"].grad.get(), np.full((2, 3), shared), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_parameters_in_both_places(cupy, comms, name):
    model = Model(
        a=Param(None, np.full(3, RANK, "f4")),
        b=Param(None, on_device(cupy, np.full(3, RANK, "f4"))),
        c=Param(None, np.full((2, 2), RANK, "f8")),
    )
    comms[name].multi_node_mean_grad(model)
    assert type(model.params["a"].grad) is type(model.params["c"].grad) is np.ndarray
    np.testing.assert_allclose(model.params["a"].grad, MEAN)
    np.testing.assert_allclose(model.params["b"].grad.get(), MEAN)
    np.testing.assert_allclose(model.params["c"].grad, np.full((2, 2), MEAN[0]))


def test_dummy(cupy, make):
    model = Model(a=Param(None, on_device(cupy, np.full(3, RANK, "f4"))))
    make("dummy").multi_node_mean_grad(model)
    np.testing.assert_array_equal(model.params["a"].grad.get(), np.full(3, RANK, "f4"))


def test_pure_nccl_refuses_host_arrays(comms):
    model = Model(a=Param(None, np.full(3, RANK, "f4")))
    with pytest.raises(
        TypeError,
        match=r"pure_nccl: expected gradients in CuPy arrays, got a NumPy array of shape \(3,\) and dtype float32",
    ):
        comms["pure_nccl"].multi_node_mean_grad(model)


@several
def test_ranks_that_differ_in_the_place_all_raise(cupy, comms):
    array = np.zeros(3, "f4")
    mine = array if RANK == 0 else on_device(cupy, array)
    message = r"first at /a: shape \(3,\) and dtype float32 on rank 0, .* dtype float32 on a device on rank 1"
    with pytest.raises(ValueError, match=message):
        comms["flat"].multi_node_mean_grad(Model(a=Param(None, mine)))
    with pytest.raises(ValueError, match=message):
        comms["flat"].bcast_data(Model(a=Param(mine)))
    with pytest.raises(ValueError, match=r"allreduce: expected arrays of the same .*'on a device'"):
        comms["flat"].allreduce(mine)


@several
def test_arrays_on_several_devices_raise_on_every_rank(cupy, comms):
    with cupy.cuda.Device(3 if RANK == 0 else RANK % cupy.DEVICES):
        other = on_device(cupy, np.zeros(3, "f4"))
    model = Model(a=Param(None, on_device(cupy, np.zeros(3, "f4"))), b=Param(None, other))
    with pytest.raises(ValueError, match=r"expected gradients on one device, got \[0, 3\]"):
        comms["flat"].multi_node_mean_grad(model)


@several
def test_ranks_that_share_a_device(cupy, make, monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with cupy.cuda.Device(0):
        comm = make("pure_nccl")
        model = Model(a=Param(None, on_device(cupy, np.full(3, RANK, "f4"))))
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"got ranks 0 and 1 both on 0000:00:00.0 .*NCCL_MULTI_RANK_GPU_ENABLE=1"
            ):
                comm.multi_node_mean_grad(model)
        # The others work without NCCL; one rank warns.
        other = make("hierarchical")
        if RANK == 0:
            with pytest.warns(UserWarning, match="averaged through host memory: expected a GPU for each rank"):
                other.multi_node_mean_grad(model)
        else:
            other.multi_node_mean_grad(model)
        np.testing.assert_allclose(model.params["a"].grad.get(), MEAN)
        np.testing.assert_allclose(other.allreduce(model.params["a"].grad).get(), MEAN * SIZE)
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        allowed = make("pure_nccl")
        model.params["a"].grad = on_device(cupy, np.full(3, RANK, "f4"))
        allowed.multi_node_mean_grad(model)
        np.testing.assert_allclose(model.params["a"].grad.get(), MEAN)


@several
def test_nccl_missing_on_one_rank(cupy, make, monkeypatch):
    import sys

    if RANK == SIZE - 1:
        monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(RuntimeError, match=r"CuPy and nccl4py, which NCCL needs: .*pip install 'mn-comm\[cuda13\]'"):
        create_communicator("pure_nccl")
    comm = make("naive", WORLD.Dup())
    total = comm.allreduce(on_device(cupy, np.full(3, RANK, "f4")))
    np.testing.assert_allclose(total.get(), MEAN * SIZE)
    assert "NCCL cannot be used on rank" in str(nccl_ranks_of(comm.ranks).obstacle)


def test_mpi_that_is_cuda_aware(cupy, make, monkeypatch):
    monkeypatch.setenv("MN_COMM_CUDA_AWARE_MPI", "1")
    comm = make("flat")
    model = Model(
        a=Param(None, on_device(cupy, np.full(3, RANK, "f4"))), b=Param(None, on_device(cupy, np.ones(2, "f2")))
    )
    comm.multi_node_mean_grad(model)
    del cupy.calls[:]
    model.params["a"].grad = on_device(cupy, np.full(3, RANK, "f4"))
    comm.multi_node_mean_grad(model)
    assert cupy.calls.count("get") == (SIZE > 1)  # MPI cannot add up half precision
    assert ("Stream.synchronize" in cupy.calls) == (SIZE > 1)
    np.testing.assert_allclose(model.params["a"].grad.get(), MEAN)
    np.testing.assert_allclose(model.params["b"].grad.get(), np.ones(2))


@several
def test_a_wrong_setting_raises_on_every_rank(cupy, make, monkeypatch):
    monkeypatch.setenv("MN_COMM_CUDA_AWARE_MPI", "yes" if RANK == 0 else "0")
    comm = make("flat")
    with pytest.raises(ValueError, match="expected 0 or 1 in MN_COMM_CUDA_AWARE_MPI, got 'yes'"):
        comm.multi_node_mean_grad(Model(a=Param(None, on_device(cupy, np.zeros(3)))))


def test_the_mpi_of_the_tests_is_not_cuda_aware():
    from mn_comm.device.awareness import is_cuda_aware
    from mn_comm.ranks.intracomm import Ranks

    assert "MN_COMM_CUDA_AWARE_MPI" in os.environ or not is_cuda_aware(Ranks(WORLD))


def in_background(reducer, model):
    reduction = reducer.start(model)
    reduction.ready_all()
    return reduction


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_in_the_background(cupy, make, name, sets):
    reducer = make(name).gradient_reducer(background=True, bucket_bytes=16, sets=sets)
    model = Model(**{key: Param(None) for key in "abc"})
    for step in range(4):
        for param in model.params.values():
            param.grad = on_device(cupy, np.full(3, RANK + step, "f4"))
        in_background(reducer, model).wait()
        for param in model.params.values():
            np.testing.assert_allclose(param.grad.get(), MEAN + step)


@several
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["pure_nccl", "hierarchical", "two_dimensional"])
def test_nccl_is_called_by_the_main_thread_on_a_stream_beside(cupy, on_nodes, name, count):
    """So two communicators never launch work in different orders on different ranks."""
    import sys

    log = sys.modules["nccl"].core.log
    reducer = on_nodes(name, count).gradient_reducer(background=True, bucket_bytes=16)
    model = Model(**{key: Param(None, on_device(cupy, np.full(3, RANK, "f4"))) for key in "abc"})
    in_background(reducer, model).wait()
    del log[:], cupy.log[:]
    reduction = in_background(reducer, model)
    launched = [what for what, *_ in log]
    reduction.wait()
    assert {thread for _, thread, _ in log} == {"MainThread"}
    assert len({stream for *_, stream in log}) == 1
    assert cupy.get_current_stream().ptr not in {stream for *_, stream in log}
    if name == "pure_nccl" or count == 1:
        assert launched == ["allreduce"] * 3 == [what for what, *_ in log]
    else:
        assert len(launched) >= 3
        assert not {"allgather", "broadcast"} & set(launched)  # these follow when the worker has finished its part
        assert {thread for what, thread, _ in cupy.log if what in ("get", "set")} <= {"mn_comm", "MainThread"}
    # The side stream starts when the gradients are packed, and the current stream waits for it before unpacking.
    names = [what for what, *_ in cupy.log]
    assert names.index("pack") < names.index("wait_event") < names.index("unpack")
    assert "Stream.synchronize" not in [what for what, thread, _ in cupy.log if thread == "MainThread"]


@several
@pytest.mark.parametrize("name", ["naive", "flat", "non_cuda_aware"])
def test_what_is_staged_is_copied_by_the_worker_which_waits_for_the_copies(cupy, make, name):
    reducer = make(name).gradient_reducer(background=True, bucket_bytes=16)
    model = Model(**{key: Param(None, on_device(cupy, np.full(3, RANK, "f4"))) for key in "abc"})
    in_background(reducer, model).wait()
    del cupy.log[:]
    in_background(reducer, model).wait()
    worker = [(what, stream) for what, thread, stream in cupy.log if thread == "mn_comm"]
    assert [what for what, _ in worker] == ["wait_event", "get", "set", "Stream.synchronize"] * 3
    assert cupy.get_current_stream() not in {stream for what, stream in worker if what != "wait_event"}
    assert {what for what, thread, _ in cupy.log if thread == "MainThread"} <= {"pack", "unpack", "set"}  # set: tables


@several
def test_a_cuda_aware_mpi_is_never_given_a_device_in_a_nonblocking_call(cupy, make, monkeypatch):
    monkeypatch.setenv("MN_COMM_CUDA_AWARE_MPI", "1")
    reducer = make("flat").gradient_reducer(background=True)
    model = Model(a=Param(None, on_device(cupy, np.full(3, RANK, "f4"))))

    def refuse(self, send, recv, *args):
        assert not isinstance(recv, cupy.ndarray)
        return real(self, send, recv, *args)

    real = MPI.Intracomm.Iallreduce
    monkeypatch.setattr("mn_comm.ranks.intracomm.Ranks.Iallreduce", refuse, raising=False)
    in_background(reducer, model).wait()
    np.testing.assert_allclose(model.params["a"].grad.get(), MEAN)


@several
def test_a_lost_peer_becomes_an_exception_that_names_the_operation(cupy, on_nodes, monkeypatch):
    import sys

    core = sys.modules["nccl"].core
    comm = on_nodes("pure_nccl", 1)
    model = Model(a=Param(None, on_device(cupy, np.full(3, RANK, "f4"))))
    comm.multi_node_mean_grad(model)
    monkeypatch.setattr(cupy.Event, "done", False)
    comm.multi_node_mean_grad(model)  # was launched on the device; no operation has finished there yet
    monkeypatch.setattr(core.Communicator, "state", core.Result.RemoteError)
    del core.calls[:]
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=rf"all_reduce of gradients: NCCL has failed on rank {RANK}, .*: RemoteError: connection"
        ):
            comm.multi_node_mean_grad(model)
    assert core.calls == ["abort"]


@pytest.mark.parametrize("name", ["flat", "hierarchical", "pure_nccl"])
def test_hooks(cupy, make, name):
    for background in (False, True):
        reducer = make(name).gradient_reducer(background=background, comm_hook=lambda bucket: bucket.average())
        other = make(name).gradient_reducer(
            background=background,
            comm_hook=lambda bucket: bucket.average(bucket.flat.astype("f8")).then(lambda m: m - m),
        )
        for each, expected in ((reducer, MEAN), (other, MEAN * 0)):
            model = Model(a=Param(None, on_device(cupy, np.full(3, RANK, "f4"))))
            if background:
                in_background(each, model).wait()
            else:
                each.average(model)
            np.testing.assert_allclose(model.params["a"].grad.get(), expected)


@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
@pytest.mark.parametrize("order", ["c", "fortran", "strided"])
def test_bcast_data(cupy, comms, name, order):
    model = Model(
        a=Param(on_device(cupy, np.full((2, 3), RANK, "f4"), order)),
        n=Param(on_device(cupy, np.array(RANK))),
        e=Param(on_device(cupy, np.zeros((0, 2)))),
        h=Param(np.full(2, RANK)),
        u=Param(None),
    )
    arrays = {key: param.data for key, param in model.params.items()}
    comms[name].bcast_data(model)
    for key in "an":
        assert model.params[key].data is arrays[key]
        assert not model.params[key].data.get().any()
    assert not model.params["h"].data.any()


def same(cupy, actual, expected):
    assert isinstance(actual, cupy.ndarray)
    assert actual.device.id == RANK % cupy.DEVICES
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.get(), expected, strict=True)


@given(
    name=st.sampled_from(["naive", "pure_nccl"]),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    dtype=st.sampled_from(["i1", "u2", "i4", "f2", "f4", "f8", "c8"]),
    layout=st.sampled_from(["c", "fortran", "strided"]),
)
def test_collectives(cupy, comms, name, shape, dtype, layout):
    comm = comms[name]

    def of(rank):
        return np.asarray(np.random.RandomState(rank).randint(0, 30, shape), dtype)

    mine = on_device(cupy, of(RANK), layout)
    root = SIZE - 1
    received = comm.bcast(mine if root == RANK else None, root=root)
    same(cupy, received, of(root))
    total = np.asarray(sum(of(rank) for rank in range(SIZE)), dtype)
    same(cupy, comm.allreduce(mine), total)
    product = np.asarray(np.prod([of(rank) for rank in range(SIZE)], axis=0), dtype)
    if np.dtype(dtype).itemsize > 2:  # the products overflow it
        same(cupy, comm.allreduce(mine, op="prod"), product)
        reduced = comm.reduce(mine, op="prod", root=root)
        if root == RANK:
            same(cupy, reduced, product)
    same(cupy, comm.reduce_scatter(on_device(cupy, np.stack([of(RANK)] * SIZE), layout)), total[None])
    same(cupy, mine, of(RANK))
    for rank, other in enumerate(comm.allgather(mine)):
        same(cupy, other, of(rank))
    for rank, other in enumerate(comm.gather(mine, root=root) or ()):
        same(cupy, other, of(rank))
    for rank, other in enumerate(comm.alltoall([mine] * SIZE)):
        same(cupy, other, of(rank))
    same(cupy, comm.scatter([mine] * SIZE if root == RANK else None, root=root), of(root))
    whole = on_device(cupy, np.stack([of(rank) for rank in range(SIZE)]), layout)
    same(cupy, comm.scatter(whole if root == RANK else None, root=root), of(RANK))


@several
def test_each_array_arrives_where_it_was(cupy, comms):
    comm = comms["naive"]
    mine = on_device(cupy, np.full(2, RANK)) if RANK == 0 else np.full(2, RANK)
    gathered = comm.allgather(mine)
    same(cupy, gathered[0], np.full(2, 0))
    assert all(type(other) is np.ndarray for other in gathered[1:])
    if RANK == 0:
        comm.send((on_device(cupy, np.arange(3.0)), np.arange(2)), dest=1)
        comm.send(on_device(cupy, np.float32(4)), dest=1, tag=2)
    if RANK == 1:
        on, off = comm.recv(source=0)
        same(cupy, on, np.arange(3.0))
        assert type(off) is np.ndarray
        same(cupy, comm.recv(source=0, tag=2), np.asarray(4, "f4"))


def test_nccl_does_what_it_can(cupy, make):
    import sys

    calls = sys.modules["nccl"].core.calls
    comm = make("naive")
    comm.allreduce(on_device(cupy, np.ones(3, "f4")))
    del calls[:]
    comm.allreduce(on_device(cupy, np.ones(3, "f2")))
    comm.bcast(on_device(cupy, np.ones(3, "u2")))
    comm.allreduce(on_device(cupy, np.ones(3, "u2")))  # NCCL cannot add these up
    assert calls == (["allreduce", "broadcast"] if SIZE > 1 else [])


def test_communicators_go_with_the_mpi_communicator(cupy):
    import sys

    from mn_comm.device import nccl

    calls = sys.modules["nccl"].core.calls
    own = WORLD.Dup()
    comm = create_communicator("pure_nccl", own)
    comm.multi_node_mean_grad(Model(a=Param(None, on_device(cupy, np.ones(3, "f4")))))
    before = len(nccl._alive)
    del calls[:]
    own.Free()
    assert calls == (["destroy"] if SIZE > 1 else [])
    assert len(nccl._alive) == before - (SIZE > 1)


def test_host_memory_is_pinned_for_as_long_as_it_is_used(cupy, make):
    gc.collect()
    before = len(cupy.registered)
    comm = make("non_cuda_aware")
    model = Model(a=Param(None, on_device(cupy, np.ones(3, "f4"))))
    comm.multi_node_mean_grad(model)
    assert len(cupy.registered) == before + (SIZE > 1)
    del model
    gc.collect()
    assert len(cupy.registered) == before


@pytest.mark.parametrize("name", NAMES)
def test_apart(cupy, make, name):
    """In a thread of the caller, in the arrays' own dtype, while this thread averages as well."""
    comm = make(name)
    apart = comm.gradient_reducer(apart=True, own_dtype=True)
    worker = Worker()
    device = cupy.cuda.Device()
    model = Model(p=Param(None, on_device(cupy, np.full(3, RANK + 1 / 3, "f4"))))
    beside = Model(p=Param(None, on_device(cupy, np.full(3, 10 * RANK, "f4"))))

    def average():
        device.use()
        apart.average(model)

    done = Future(average, worker)
    comm.multi_node_mean_grad(beside)
    done.wait()
    worker.close()
    np.testing.assert_allclose(model.params["p"].grad.get(), MEAN + 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(beside.params["p"].grad.get(), 10 * MEAN)
