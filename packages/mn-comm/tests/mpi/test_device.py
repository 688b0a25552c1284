"""Arrays on devices: how they are transferred, and that they arrive."""

import gc
import sys

import numpy as np
import pytest
from fake_model import Model, Param
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from on_gpu import random

from mn_comm import Future, create_communicator
from mn_comm.building_blocks import Worker
from mn_comm.device import nccl, staging
from mn_comm.device.nccl_ranks import nccl_ranks_of

cupy = pytest.importorskip("cupy")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sizes(1, 4),
    pytest.mark.filterwarnings("ignore:gradients on devices are averaged through host memory"),
]

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
NAMES = ["naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware", "pure_nccl"]
MEAN = np.full(3, (SIZE - 1) / 2, "f4")

several = pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")


@pytest.fixture(scope="module")
def comms(devices):
    made = {name: create_communicator(name) for name in NAMES}
    yield made
    for comm in made.values():
        comm.finalize()


def on_device(array, layout="c"):
    array = np.array(array)
    if layout == "strided" and array.ndim:
        wide = cupy.asarray(np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype))
        wide[..., ::2] = cupy.asarray(array)
        return wide[..., ::2]
    return cupy.asarray(np.asarray(array, order="F" if layout == "fortran" else "C"))


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
@settings(max_examples=10)
def test_every_strategy_computes_the_mean(comms, name, parameters, batched):
    comms[name].set_config("batched_copy", batched)
    grads = {
        f"p{i}": [random(shape, dtype, rank, i) for rank in range(SIZE)]
        for i, (shape, dtype, _) in enumerate(parameters)
    }
    model = Model(
        **{
            key: Param(cupy.asarray(np.zeros_like(each[0])), on_device(each[RANK], parameters[i][2]))
            for i, (key, each) in enumerate(grads.items())
        }
    )
    comms[name].multi_node_mean_grad(model)
    check_means(model, grads)


@pytest.mark.parametrize(("batched", "launches"), [(True, 1), (False, 3)])
def test_one_launch_for_all_parameters_or_one_each(make, trace, batched, launches):
    comm = make("flat")
    comm.set_config("batched_copy", not batched)
    model = Model(**{name: Param(None, on_device(np.full(4, RANK, "f4"))) for name in "abc"})
    comm.multi_node_mean_grad(model)
    comm.set_config("batched_copy", batched)
    counts = []
    for _ in range(2):
        with trace as traced:
            comm.multi_node_mean_grad(model)
        names = traced.names("kernel", "copy")
        counts.append([names.count(name) for name in ("pack", "unpack", "to device")])
    # Apart from the buffer, each launch needs a table, once: the gradients are not copied.
    staged = int(SIZE > 1)
    assert counts == [[launches, launches, staged + launches], [launches, launches, staged]]


@pytest.mark.parametrize("layout", ["c", "fortran", "strided"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_keep_their_arrays_and_may_be_missing_or_shared(comms, name, layout):
    grad = on_device(np.full((2, 3), RANK, "f4"), layout)
    zeros = [on_device(np.zeros((2, 3), "f4")) for _ in "abc"]
    model = Model(a=Param(zeros[0], grad), b=Param(zeros[1]), c=Param(None), d=Param(zeros[2]))
    for value in range(3):
        grad[...] = cupy.asarray(np.full((2, 3), RANK + value, "f4"))
        model.params["d"].grad = model.params["a"].grad if RANK == 0 else on_device(np.full((2, 3), 5, "f4"))
        comms[name].multi_node_mean_grad(model, zero_fill=True)
        assert model.params["a"].grad is grad
        np.testing.assert_allclose(grad.get(), np.full((2, 3), MEAN[0] + value))
        np.testing.assert_allclose(model.params["b"].grad.get(), np.zeros((2, 3)))
        assert model.params["c"].grad is None
        shared = (value + 5 * (SIZE - 1)) / SIZE
        np.testing.assert_allclose(model.params["d"].grad.get(), np.full((2, 3), shared), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_parameters_in_both_places(comms, name):
    model = Model(
        a=Param(None, np.full(3, RANK, "f4")),
        b=Param(None, on_device(np.full(3, RANK, "f4"))),
        c=Param(None, np.full((2, 2), RANK, "f8")),
    )
    comms[name].multi_node_mean_grad(model)
    assert type(model.params["a"].grad) is type(model.params["c"].grad) is np.ndarray
    np.testing.assert_allclose(model.params["a"].grad, MEAN)
    np.testing.assert_allclose(model.params["b"].grad.get(), MEAN)
    np.testing.assert_allclose(model.params["c"].grad, np.full((2, 2), MEAN[0]))


def test_dummy(make):
    model = Model(a=Param(None, on_device(np.full(3, RANK, "f4"))))
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
def test_ranks_that_differ_in_the_place_all_raise(comms):
    array = np.zeros(3, "f4")
    mine = array if RANK == 0 else on_device(array)
    message = r"first at /a: shape \(3,\) and dtype float32 on rank 0, .* dtype float32 on a device on rank 1"
    with pytest.raises(ValueError, match=message):
        comms["flat"].multi_node_mean_grad(Model(a=Param(None, mine)))
    with pytest.raises(ValueError, match=message):
        comms["flat"].bcast_data(Model(a=Param(mine)))
    with pytest.raises(ValueError, match=r"allreduce: expected arrays of the same .*'on a device'"):
        comms["flat"].allreduce(mine)


@several
def test_arrays_on_several_devices_raise_on_every_rank(devices, comms):
    if devices < 4:
        pytest.skip("needs four devices")
    with cupy.cuda.Device(3 if RANK == 0 else RANK):
        other = on_device(np.zeros(3, "f4"))
    model = Model(a=Param(None, on_device(np.zeros(3, "f4"))), b=Param(None, other))
    with pytest.raises(ValueError, match=r"expected gradients on one device, got \[0, 3\]"):
        comms["flat"].multi_node_mean_grad(model)


@several
def test_ranks_that_share_a_device(make, monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with cupy.cuda.Device(0):
        comm = make("pure_nccl")
        model = Model(a=Param(None, on_device(np.full(3, RANK, "f4"))))
        for _ in range(2):
            with pytest.raises(ValueError, match=r"got ranks 0 and 1 both on .*NCCL_MULTI_RANK_GPU_ENABLE=1"):
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
        model.params["a"].grad = on_device(np.full(3, RANK, "f4"))
        allowed.multi_node_mean_grad(model)
        np.testing.assert_allclose(model.params["a"].grad.get(), MEAN)


@several
def test_nccl_missing_on_one_rank(make, monkeypatch):
    if RANK == SIZE - 1:
        monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(RuntimeError, match=r"CuPy and nccl4py, which NCCL needs: .*pip install 'mn-comm\[cuda13\]'"):
        create_communicator("pure_nccl")
    comm = make("naive", WORLD.Dup())
    total = comm.allreduce(on_device(np.full(3, RANK, "f4")))
    np.testing.assert_allclose(total.get(), MEAN * SIZE)
    assert "NCCL cannot be used on rank" in str(nccl_ranks_of(comm.ranks).obstacle)


def test_mpi_that_is_cuda_aware(cuda_aware, make, trace):
    comm = make("flat")
    model = Model(a=Param(None, on_device(np.full(3, RANK, "f4"))), b=Param(None, on_device(np.ones(2, "f2"))))
    comm.multi_node_mean_grad(model)
    model.params["a"].grad = on_device(np.full(3, RANK, "f4"))
    with trace as traced:
        comm.multi_node_mean_grad(model)
    assert traced.names("copy").count("to host") == (SIZE > 1)  # MPI cannot add up half precision
    assert ("for a stream" in traced.names("wait")) == (SIZE > 1)
    np.testing.assert_allclose(model.params["a"].grad.get(), MEAN)
    np.testing.assert_allclose(model.params["b"].grad.get(), np.ones(2))


@several
def test_a_wrong_setting_raises_on_every_rank(make, monkeypatch):
    monkeypatch.setenv("MN_COMM_CUDA_AWARE_MPI", "yes" if RANK == 0 else "0")
    comm = make("flat")
    with pytest.raises(ValueError, match="expected 0 or 1 in MN_COMM_CUDA_AWARE_MPI, got 'yes'"):
        comm.multi_node_mean_grad(Model(a=Param(None, on_device(np.zeros(3)))))


def in_background(reducer, model):
    reduction = reducer.start(model)
    reduction.ready_all()
    return reduction


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_in_the_background(make, name, sets):
    reducer = make(name).gradient_reducer(background=True, bucket_bytes=16, sets=sets)
    model = Model(**{key: Param(None) for key in "abc"})
    for step in range(4):
        for param in model.params.values():
            param.grad = on_device(np.full(3, RANK + step, "f4"))
        in_background(reducer, model).wait()
        for param in model.params.values():
            np.testing.assert_allclose(param.grad.get(), MEAN + step)


@several
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["pure_nccl", "hierarchical", "two_dimensional"])
def test_nccl_is_called_by_the_main_thread_on_a_stream_beside(on_nodes, trace, name, count):
    """So two communicators never launch work in different orders on different ranks."""
    comm = on_nodes(name, count)
    reducer = comm.gradient_reducer(background=True, bucket_bytes=16)
    model = Model(**{key: Param(None, on_device(np.full(3, RANK, "f4"))) for key in "abc"})
    in_background(reducer, model).wait()
    with trace as traced:
        reduction = in_background(reducer, model)
        launched = traced.names("nccl")
        reduction.wait()
    called = [each for each in traced.operations if each.kind == "nccl"]
    assert {each.thread for each in called} == {"MainThread"}
    assert len({each.stream for each in called}) == 1
    assert cupy.cuda.get_current_stream().ptr not in {each.stream for each in called}
    if name == "pure_nccl" or count == 1:
        assert launched == ["allreduce"] * 3 == [each.name for each in called]
    else:
        assert len(launched) >= 3
        assert not {"allgather", "broadcast"} & set(launched)  # these follow when the worker has finished its part
        assert {each.thread for each in traced.operations if each.kind == "copy"} <= {"mn_comm", "MainThread"}
    # The side stream starts when the gradients are packed, and the current stream waits for it before unpacking.
    kinds = [each.name if each.kind == "kernel" else each.kind for each in traced.operations]
    assert kinds.index("pack") < kinds.index("wait_event") < kinds.index("unpack")
    assert "MainThread" not in {each.thread for each in traced.operations if each.kind == "wait"}
    comm.finalize()


@several
@pytest.mark.parametrize("name", ["naive", "flat", "non_cuda_aware"])
def test_what_is_staged_is_copied_by_the_worker_which_waits_for_the_copies(make, trace, name):
    reducer = make(name).gradient_reducer(background=True, bucket_bytes=16)
    model = Model(**{key: Param(None, on_device(np.full(3, RANK, "f4"))) for key in "abc"})
    in_background(reducer, model).wait()
    with trace as traced:
        in_background(reducer, model).wait()
    worker = [each for each in traced.operations if each.thread == "mn_comm"]
    each_bucket = ["wait_event", "to host", "for a stream", "to device", "for a stream"]
    assert [each.name or each.kind for each in worker] == each_bucket * 3
    assert cupy.cuda.get_current_stream().ptr not in {each.stream for each in worker}
    others = [each for each in traced.operations if each.thread != "mn_comm"]
    assert {each.name for each in others} <= {"pack", "unpack", "to device"}  # to the device: tables
    assert {each.thread for each in others} == {"MainThread"}


@several
def test_a_cuda_aware_mpi_is_never_given_a_device_in_a_nonblocking_call(cuda_aware, make, monkeypatch):
    reducer = make("flat").gradient_reducer(background=True)
    model = Model(a=Param(None, on_device(np.full(3, RANK, "f4"))))

    def refuse(self, send, recv, *args):
        assert not isinstance(recv, cupy.ndarray)
        return real(self, send, recv, *args)

    real = MPI.Intracomm.Iallreduce
    monkeypatch.setattr("mn_comm.ranks.intracomm.Ranks.Iallreduce", refuse, raising=False)
    in_background(reducer, model).wait()
    np.testing.assert_allclose(model.params["a"].grad.get(), MEAN)


@pytest.mark.parametrize("name", ["flat", "hierarchical", "pure_nccl"])
def test_hooks(make, name):
    for background in (False, True):
        reducer = make(name).gradient_reducer(background=background, comm_hook=lambda bucket: bucket.average())
        other = make(name).gradient_reducer(
            background=background,
            comm_hook=lambda bucket: bucket.average(bucket.flat.astype("f8")).then(lambda m: m - m),
        )
        for each, expected in ((reducer, MEAN), (other, MEAN * 0)):
            model = Model(a=Param(None, on_device(np.full(3, RANK, "f4"))))
            if background:
                in_background(each, model).wait()
            else:
                each.average(model)
            np.testing.assert_allclose(model.params["a"].grad.get(), expected)


@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
@pytest.mark.parametrize("order", ["c", "fortran", "strided"])
def test_bcast_data(comms, name, order):
    model = Model(
        a=Param(on_device(np.full((2, 3), RANK, "f4"), order)),
        n=Param(on_device(np.array(RANK))),
        e=Param(on_device(np.zeros((0, 2)))),
        h=Param(np.full(2, RANK)),
        u=Param(None),
    )
    arrays = {key: param.data for key, param in model.params.items()}
    comms[name].bcast_data(model)
    for key in "an":
        assert model.params[key].data is arrays[key]
        assert not model.params[key].data.get().any()
    assert not model.params["h"].data.any()


def same(actual, expected):
    assert isinstance(actual, cupy.ndarray)
    assert actual.device.id == cupy.cuda.Device().id
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.get(), expected, strict=True)


@several
def test_each_array_arrives_where_it_was(comms):
    comm = comms["naive"]
    mine = on_device(np.full(2, RANK)) if RANK == 0 else np.full(2, RANK)
    gathered = comm.allgather(mine)
    same(gathered[0], np.full(2, 0))
    assert all(type(other) is np.ndarray for other in gathered[1:])
    if RANK == 0:
        comm.send((on_device(np.arange(3.0)), np.arange(2)), dest=1)
        comm.send(on_device(np.float32(4)), dest=1, tag=2)
    if RANK == 1:
        on, off = comm.recv(source=0)
        same(on, np.arange(3.0))
        assert type(off) is np.ndarray
        same(comm.recv(source=0, tag=2), np.asarray(4, "f4"))


def test_nccl_does_what_it_can(make, trace):
    comm = make("naive")
    comm.allreduce(on_device(np.ones(3, "f4")))
    with trace as traced:
        comm.allreduce(on_device(np.ones(3, "f2")))
        comm.bcast(on_device(np.ones(3, "u2")))
        comm.allreduce(on_device(np.ones(3, "u2")))  # NCCL cannot add these up
    assert traced.names("nccl") == (["allreduce", "broadcast"] if SIZE > 1 else [])


def test_communicators_go_with_the_mpi_communicator(devices, trace):
    own = WORLD.Dup()
    comm = create_communicator("pure_nccl", own)
    comm.multi_node_mean_grad(Model(a=Param(None, on_device(np.ones(3, "f4")))))
    before = len(nccl._alive)
    with trace as traced:
        own.Free()
    assert traced.names("nccl") == (["destroy"] if SIZE > 1 else [])
    assert len(nccl._alive) == before - (SIZE > 1)


def test_host_memory_is_pinned_for_as_long_as_it_is_used(make):
    gc.collect()
    before = set(staging._users)
    comm = make("non_cuda_aware")
    model = Model(a=Param(None, on_device(np.ones(3, "f4"))))
    comm.multi_node_mean_grad(model)
    added = set(staging._users) - before
    assert len(added) == (SIZE > 1)
    kind = cupy.cuda.runtime.pointerGetAttributes
    assert all(kind(address).type == cupy.cuda.runtime.memoryTypeHost for address in added)
    del model
    gc.collect()
    assert set(staging._users) == before
    assert all(kind(address).type == 0 for address in added)


@pytest.mark.parametrize("name", NAMES)
def test_apart(make, name):
    """In a thread of the caller, in the arrays' own dtype, while this thread averages as well."""
    comm = make(name)
    apart = comm.gradient_reducer(apart=True, own_dtype=True)
    worker = Worker()
    device = cupy.cuda.Device()
    model = Model(p=Param(None, on_device(np.full(3, RANK + 1 / 3, "f4"))))
    beside = Model(p=Param(None, on_device(np.full(3, 10 * RANK, "f4"))))

    def average():
        device.use()
        apart.average(model)

    done = Future(average, worker)
    comm.multi_node_mean_grad(beside)
    done.wait()
    worker.close()
    np.testing.assert_allclose(model.params["p"].grad.get(), MEAN + 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(beside.params["p"].grad.get(), 10 * MEAN)


@pytest.mark.parametrize("name", [*NAMES, "dummy"])
def test_arrays_that_one_rank_owns(comms, make, name):
    comm = comms.get(name) or make(name)
    owners = [i % SIZE for i in range(4)]
    for step in range(3):
        named = [
            (str(i), on_device(np.full((3, i), step + i if owner == RANK else -1, "f4")))
            for i, owner in enumerate(owners)
        ]
        named[1] = ("1", np.full(5, step if owners[1] == RANK else -1, "f8"))
        comm.all_gather_owned(named, owners)
        for i, (_, array) in enumerate(named):
            value = array if i == 1 else array.get()
            np.testing.assert_array_equal(value, np.full(value.shape, step if i == 1 else step + i))
    array = on_device(np.full(3, RANK))
    failure = ZeroDivisionError("that was zero") if RANK == SIZE - 1 else None
    with pytest.raises(ZeroDivisionError, match="that was zero"):
        comm.all_gather_owned([("a", array)], [SIZE - 1], failure)
    assert (array == SIZE - 1).all()
    if SIZE > 1:
        with pytest.raises(ValueError, match=r"a: shape .* on a device"):
            array = on_device(np.zeros(3)) if RANK == 0 else np.zeros(3)
            comm.all_gather_owned([("a", array)], [0])


@several
@pytest.mark.parametrize("name", ["pure_nccl", "hierarchical", "two_dimensional"])
def test_a_thread_of_the_program_does_not_call_nccl(make, trace, name):
    """If the program's main thread also calls it, ranks may call it in different orders, and wait forever."""
    apart = make(name).gradient_reducer(apart=True)
    model = Model(p=Param(None, on_device(np.full(3, RANK, "f4"))))
    worker, device = Worker(), cupy.cuda.Device()

    def average():
        device.use()
        apart.average(model)

    with trace as traced:
        Future(average, worker).wait()
    worker.close()
    assert traced.names("nccl") == []
    assert traced.names("copy").count("to host") == 1
    np.testing.assert_allclose(model.params["p"].grad.get(), MEAN)


@several
@pytest.mark.parametrize("name", ["pure_nccl", "hierarchical", "two_dimensional"])
def test_two_reductions_use_one_stream_beside_the_program_s(make, trace, name):
    """Compression keeps arrays from one to the next."""
    reducer = make(name).gradient_reducer(background=True, sets=2)
    models = [Model(a=Param(None, on_device(np.full(3, RANK + i, "f4")))) for i in range(2)]
    with trace as traced:
        reductions = [in_background(reducer, model) for model in models]
        for reduction in reductions:
            reduction.wait()
    assert len({each.stream for each in traced.operations if each.kind == "nccl"}) == 1
    for i, model in enumerate(models):
        np.testing.assert_allclose(model.params["a"].grad.get(), MEAN + i)
