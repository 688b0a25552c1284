"""Ranks with real devices, or two that share one: each strategy against the mean, and the collectives.

For two ranks on one GPU: ``NCCL_MULTI_RANK_GPU_ENABLE=1 mpiexec -n 2 python -m mpi4py -m pytest -x -m gpu``. Without
that variable, tests that need NCCL are skipped there.
"""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI
from on_gpu import SHARING, average, has_bfloat16, is_emulated, random, slow

from mn_comm import create_communicator
from mn_comm.device import nccl
from mn_comm.device.kernels import Table, pack
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
WIRES = [None, "f2", "f4", "f8", *(["bfloat16"] if has_bfloat16() else [])]
several = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
SHAPES = {"a": (7, 3), "b": (1,), "c": (), "d": (0,), "e": (100_003,), "f": (64, 3, 7, 7)}
LAYOUTS = ["c", "fortran", "strided"]


def on_device(array, layout):
    """Return a copy of an array on the device, in some memory layout."""
    if layout == "strided" and array.ndim:
        wide = cupy.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
        wide[..., ::2] = cupy.asarray(array)
        return wide[..., ::2]
    return cupy.asarray(np.asarray(array, order="F" if layout == "fortran" else "C"))


def check(model, grads, wire=None):
    for key, each in grads.items():
        actual = model.params[key].grad.get()
        expected = np.mean([np.asarray(g, "f8") for g in each], axis=0)
        eps = max(2**-8 if dtype == "bfloat16" else np.finfo(dtype).eps for dtype in (actual.dtype, wire or "f8"))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=SIZE * eps)
        for other in WORLD.allgather(actual.tobytes()):
            assert other == actual.tobytes()


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_computes_the_mean(make, name, wire, batched):
    comm = make(name, allreduce_grad_dtype=wire, batched_copy=batched)
    for step, layout in enumerate(LAYOUTS):
        grads = {
            key + dtype: [random(shape, dtype, rank, step) for rank in range(SIZE)]
            for key, shape in SHAPES.items()
            for dtype in ("f2", "f4", "f8")
        }
        model = Model(**{key: Param(None, on_device(each[RANK], layout)) for key, each in grads.items()})
        comm.multi_node_mean_grad(model)
        check(model, grads, wire)


@several
def test_gradients_in_host_memory_and_on_a_device_do_not_use_the_same_memory(make):
    """Another rank may still be reading the sums of the former while the latter are copied."""
    comm = make("non_cuda_aware")
    grads = {key: [random((1000,), "f4", rank, 0) for rank in range(SIZE)] for key in "ab"}
    model = Model(a=Param(None, grads["a"][RANK].copy()), b=Param(None, cupy.asarray(grads["b"][RANK])))
    for _ in range(2):
        comm.multi_node_mean_grad(model)
    on_host, on_device = comm._reducer_of(model)._layouts._latest[-1].buckets().buckets
    assert not np.shares_memory(on_host.memory, on_device.host.memory)


@several
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("wire", [None, "f2", "f8"])
@pytest.mark.parametrize("name", NAMES)
def test_two_nodes(on_nodes, devices, name, wire, in_turns, in_background):
    if name == "single_node" or (name == "pure_nccl" and devices < SIZE and not SHARING):
        pytest.skip("needs one node, or a device for each rank")
    options = {"in_turns": in_turns, "background": in_background, "allreduce_grad_dtype": wire}
    comm = on_nodes(name, 2, **options)
    reducer = comm.gradient_reducer(background=in_background, bucket_bytes=1 << 18)
    for step in range(3):
        grads = {key: [random(shape, "f4", rank, step) for rank in range(SIZE)] for key, shape in SHAPES.items()}
        model = Model(**{key: Param(None, cupy.asarray(each[RANK])) for key, each in grads.items()})
        average(reducer, model, in_background)
        check(model, grads, wire)
    comm.finalize()


@pytest.mark.skipif(SIZE < 4, reason="needs a node of several ranks, and two others")
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("name", ["flat", "hierarchical", "two_dimensional", "non_cuda_aware", "pure_nccl"])
def test_three_nodes_of_different_sizes(on_nodes, devices, name, in_background):
    comm = on_nodes(name, 3, background=in_background)
    assert comm.inter_size == 3
    reducer = comm.gradient_reducer(background=in_background)
    for step in range(3):
        grads = {key: [random(shape, "f4", rank, step) for rank in range(SIZE)] for key, shape in SHAPES.items()}
        model = Model(**{key: Param(None, cupy.asarray(each[RANK])) for key, each in grads.items()})
        average(reducer, model, in_background)
        check(model, grads)
    comm.finalize()


@pytest.mark.parametrize("name", NAMES)
def test_on_another_stream_and_in_the_background(make, name):
    comm = make(name)
    reducer = comm.gradient_reducer(background=True, bucket_bytes=1 << 16, sets=2)
    model = Model(**{key: Param(None) for key in SHAPES})
    with cupy.cuda.Stream(non_blocking=True):
        for step in range(5):
            grads = {key: [random(shape, "f4", rank, step) for rank in range(SIZE)] for key, shape in SHAPES.items()}
            for key, param in model.params.items():
                param.grad = cupy.asarray(grads[key][RANK])
            average(reducer, model, in_background=True)
            check(model, grads)


@pytest.mark.parametrize("sizes", [[1000, 300_000, 600_000], [600_000, 300_000, 1000]])
@pytest.mark.parametrize("name", NAMES)
def test_buckets_of_different_sizes(make, name, sizes):
    comm = make(name)
    dtypes = ["f2", "f4", "f8"] if name != "pure_nccl" else ["f4"]
    grads = {
        f"{dtype}-{place}": [random(size, dtype, rank, place) for rank in range(SIZE)]
        for dtype in dtypes
        for place, size in enumerate(sizes)
    }
    model = Model(**{key: Param(None, cupy.asarray(each[RANK])) for key, each in grads.items()})
    for _ in range(2):
        comm.multi_node_mean_grad(model)
    check(model, {key: [np.mean(np.asarray(each, "f8"), axis=0)] for key, each in grads.items()})


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_on_a_device_that_is_not_the_current_one(make, devices, name, in_background):
    if devices <= SIZE:
        pytest.skip("needs a device more than there are ranks")
    cupy.cuda.Device(0).use()
    comm = make(name)
    reducer = comm.gradient_reducer(background=in_background)
    with cupy.cuda.Device(RANK + 1):
        model = Model(a=Param(None, cupy.empty(1000, "f4")))
    for step in range(6):
        with cupy.cuda.Device(RANK + 1):
            model.params["a"].grad[...] = RANK + step
        average(reducer, model, in_background)
        with cupy.cuda.Device(RANK + 1):
            mean = model.params["a"].grad.get()
        np.testing.assert_allclose(mean, np.mean(range(SIZE)) + step, rtol=1e-6)
    cupy.cuda.Device(RANK % devices).use()


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("name", ["flat", "pure_nccl"])
def test_what_a_hook_adds_to_an_average_runs_on_the_device_of_the_bucket(make, devices, name, in_background):
    if devices <= SIZE:
        pytest.skip("needs a device more than there are ranks")
    cupy.cuda.Device(0).use()
    used = []

    def double(mean):
        used.append(cupy.cuda.Device().id)
        return mean * 2

    reducer = make(name).gradient_reducer(
        background=in_background, comm_hook=lambda bucket: bucket.average().then(double)
    )
    with cupy.cuda.Device(RANK + 1):
        model = Model(a=Param(None, cupy.full(1000, float(RANK), "f4")))
    average(reducer, model, in_background)
    assert used == [RANK + 1]
    np.testing.assert_allclose(model.params["a"].grad.get(), 2 * np.mean(range(SIZE)), rtol=1e-6)
    cupy.cuda.Device(RANK % devices).use()


@pytest.mark.parametrize("name", ["naive", "flat"])
def test_cuda_aware_mpi_in_the_background(cuda_aware, make, name):
    reducer = make(name).gradient_reducer(background=True, bucket_bytes=1 << 12, sets=2)
    for step in range(10):
        model = Model(**{f"p{i}": Param(None, cupy.full(1000 + i, float(RANK + step), "f4")) for i in range(6)})
        average(reducer, model, in_background=True)
        for param in model.params.values():
            np.testing.assert_allclose(param.grad.get(), np.mean(range(SIZE)) + step, rtol=1e-6)


@several
@pytest.mark.parametrize("name", ["flat", "pure_nccl"])
def test_the_memory_of_what_a_hook_returns_is_not_reused_too_early(make, name):
    def staged(bucket):
        bucket.submit(lambda: time.sleep(0.1))  # then the mean before is given back while it is still to be unpacked
        return bucket.average(bucket.flat * 2)

    hook = {"flat": staged, "pure_nccl": lambda bucket: bucket.average().then(lambda mean: mean * 2)}[name]
    reducer = make(name).gradient_reducer(background=True, sets=2, comm_hook=hook)
    for step in range(3):  # the kernels are compiled in the first one
        models = [Model(a=Param(None, cupy.full(100_000, RANK + 10.0 * i + step, "f4"))) for i in range(2)]
        reductions = [reducer.start(model, zero_fill=False) for model in models[:1]]
        reductions[0].ready_all()
        reductions.append(reducer.start(models[1], zero_fill=False))
        reductions[1].ready_all()
        slow(cupy.cuda.get_current_stream(), 0.5)
        while reductions:
            reductions.pop(0).wait()
        for i, model in enumerate(models):
            expected = 2 * (np.mean(range(SIZE)) + 10 * i + step)
            np.testing.assert_allclose(model.params["a"].grad.get(), expected, rtol=1e-6)


@several
def test_a_mean_that_nobody_waits_for_does_not_overwrite_other_arrays(make):
    """The optimizer of one training is dropped with the last mean under way; the next training takes its memory."""
    buckets, may_go_on = [], threading.Event()
    may_go_on.set()

    def late(bucket):
        buckets.append(weakref.ref(bucket))
        with bucket.on_side_stream() as stream:
            stream.launch_host_func(lambda _: may_go_on.wait(20), None)
        return bucket.average()

    reducer = make("pure_nccl").gradient_reducer(background=True, comm_hook=late)
    model = Model(a=Param(None, cupy.full(100_000, 1, "f4")))
    average(reducer, model, in_background=True)  # the kernels are compiled
    cupy.cuda.Device().synchronize()
    may_go_on.clear()
    reduction = reducer.start(model, zero_fill=False)
    reduction.ready_all()
    del reducer, reduction
    while buckets[-1]() is not None:  # a thread may still have it
        gc.collect()
    others = [cupy.full(100_000, RANK, "f4") for _ in range(20)]  # a mean of them would be seen
    filled = cupy.cuda.get_current_stream().record()
    until = time.monotonic() + 1
    while not filled.done and time.monotonic() < until:  # it must not be done before the mean
        time.sleep(0.01)
    may_go_on.set()
    cupy.cuda.Device().synchronize()
    for other in others:
        np.testing.assert_array_equal(other.get(), RANK)


def test_addresses_are_not_overwritten_before_they_are_uploaded(devices):
    """A table is dropped while its addresses are still to be copied, and the next one takes its pinned memory."""
    gradients, others = ([cupy.full(1000, value, "f4") for _ in range(5)] for value in (3, 4))
    packed = cupy.zeros(5000, "f4")
    pack(Table(range(0, 5000, 1000), 5000), gradients, np.dtype("f4"), packed)  # the kernel is compiled
    cupy.cuda.Device().synchronize()
    packed[...] = 0
    may_go_on = threading.Event()
    cupy.cuda.get_current_stream().launch_host_func(lambda _: may_go_on.wait(20), None)
    pack(Table(range(0, 5000, 1000), 5000), gradients, np.dtype("f4"), packed)
    tables = [Table(range(0, 5000, 1000), 5000) for _ in range(10)]
    for table in tables:
        table.on_device([other.data.ptr for other in others])
    may_go_on.set()
    np.testing.assert_array_equal(packed.get(), 3)


@pytest.mark.skipif(SIZE < 4, reason="needs two nodes of two ranks")
def test_a_future_and_what_follows_from_it_may_both_be_waited_for(on_nodes, devices):
    if devices < SIZE and not SHARING:
        pytest.skip("needs a device for each rank")

    def hook(bucket):
        exact = bucket.average()
        doubled = exact.then(lambda mean: mean * 2)
        if RANK == 0:
            exact.wait()
        return doubled

    reducer = on_nodes("hierarchical", 2).gradient_reducer(comm_hook=hook)
    model = Model(a=Param(None, cupy.full(1000, float(RANK), "f4")))
    reducer.average(model)
    np.testing.assert_allclose(model.params["a"].grad.get(), SIZE - 1)


@several
def test_two_communicators_in_two_threads(devices):
    of_mpi = [WORLD.Dup() for _ in range(2)]
    comms = [create_communicator(name, each) for name, each in zip(("flat", "non_cuda_aware"), of_mpi, strict=True)]
    found, device = {}, cupy.cuda.Device().id

    def train(number):
        cupy.cuda.Device(device).use()
        reducer = comms[number].gradient_reducer()
        with cupy.cuda.Stream(non_blocking=True):
            for step in range(10):
                model = Model(**{f"p{i}": Param(None, cupy.full(1000 + i, RANK + step, "f4")) for i in range(5)})
                reducer.average(model)
                means = [param.grad.get() for param in model.params.values()]
                found.setdefault(number, []).append([float(each.mean()) - step for each in means])

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        np.testing.assert_allclose(found[number], np.full((10, 5), np.mean(range(SIZE))), rtol=1e-5)
    for comm, each in zip(comms, of_mpi, strict=True):
        comm.finalize()
        each.Free()


@several
@pytest.mark.parametrize("name", NAMES)
def test_an_exception_between_two_buckets(make, name):
    reducer = make(name).gradient_reducer(background=True, bucket_bytes=4000, sets=2)
    model = Model(**{f"p{i}": Param(None, cupy.full(1000, float(RANK), "f4")) for i in range(4)})
    for step in range(4):
        for param in model.params.values():
            param.grad[...] = RANK + step
        current = reducer.start(model, zero_fill=False)
        if step % 2 == 0:
            current.drain()  # what schemes do if the backward pass raises an exception
            continue
        current.ready_all()
        current.wait()
        for param in model.params.values():
            np.testing.assert_allclose(param.grad.get(), np.mean(range(SIZE)) + step, rtol=1e-6)


@pytest.fixture
def own(devices):
    """A communicator that shares nothing with others, because NCCL fails in it."""
    if devices < SIZE and not SHARING:
        pytest.skip("needs a device for each rank")
    of_mpi = WORLD.Dup()
    comm = create_communicator("pure_nccl", of_mpi)
    yield comm
    comm.finalize()
    of_mpi.Free()


@several
def test_an_error_of_nccl_ends_the_operation_and_is_raised(own, monkeypatch):
    comm = own
    model = Model(a=Param(None, cupy.full(1000, float(RANK), "f4")))
    comm.multi_node_mean_grad(model)
    slow(cupy.cuda.get_current_stream(), 1)
    comm.multi_node_mean_grad(model)  # cannot have finished when the next one begins
    monkeypatch.setattr(nccl.NcclCommunicator, "problem", lambda self: "RemoteError: connection closed by the peer")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"all_reduce of gradients: NCCL has failed on rank {RANK}, .*RemoteErr"):
            comm.multi_node_mean_grad(model)
    cupy.cuda.Device().synchronize()


@several
def test_a_peer_that_has_aborted_is_named_where_others_wait(own):
    """NCCL itself reports it; what a real one reports, and when, is up to it."""
    if not is_emulated():
        pytest.skip("the error comes from an emulated NCCL")
    ranks = nccl_ranks_of(own._contexts.foreground.ranks)
    communicator, array = ranks.connect(), cupy.zeros(10, "f4")
    communicator.all_reduce(array)
    cupy.cuda.Device().synchronize()
    WORLD.Barrier()
    if RANK == 0:
        communicator.abort()
    WORLD.Barrier()
    if RANK:
        slow(cupy.cuda.get_current_stream())
        communicator.all_reduce(array)
        ranks.launched(communicator, "all_reduce of gradients")
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=f"^all_reduce of gradients: NCCL has failed on rank {RANK}, .*Remote"
            ):
                ranks.raise_failure()
        assert communicator not in nccl._alive  # it was aborted, too
    cupy.cuda.Device().synchronize()


@several
def test_abort_ends_what_a_peer_has_not_begun(devices):
    if devices < SIZE and not SHARING:
        pytest.skip("needs a device for each rank")
    communicator = nccl.NcclCommunicator(SIZE, WORLD.bcast(nccl.get_unique_id()), RANK)
    array = cupy.zeros(10, "f4")
    communicator.all_reduce(array)
    cupy.cuda.Device().synchronize()
    if RANK == 0:
        communicator.all_reduce(array)
    WORLD.Barrier()
    communicator.abort()
    cupy.cuda.Device().synchronize()


@several
def test_communicators_that_were_destroyed_are_not_asked(own):
    comm = own
    comm.multi_node_mean_grad(Model(a=Param(None, cupy.ones(10, "f4"))))
    ranks = nccl_ranks_of(comm._contexts.foreground.ranks)
    communicator = ranks.connect()
    slow(cupy.cuda.get_current_stream())
    ranks.launched(communicator, "all_reduce of gradients")
    ranks.destroy()
    ranks.raise_failure()


def integers(shape, dtype, rank):
    return np.asarray(np.random.RandomState(rank).randint(0, 30, shape), dtype)


def same(actual, expected):
    assert isinstance(actual, cupy.ndarray)
    assert actual.device == cupy.cuda.Device()
    np.testing.assert_array_equal(actual.get(), expected, strict=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "f2", "f4", "f8", "c8"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1000, 3)])
def test_reductions(make, name, dtype, shape, layout):
    comm, root = make(name), SIZE - 1
    each = [integers(shape, dtype, rank) for rank in range(SIZE)]
    mine, total = on_device(each[RANK], layout), np.asarray(sum(each), dtype)
    same(comm.allreduce(mine), total)
    if np.dtype(dtype).itemsize > 2:  # the products overflow it
        product = np.asarray(np.prod(each, axis=0), dtype)
        same(comm.allreduce(mine, op="prod"), product)
        reduced = comm.reduce(mine, op="prod", root=root)
        if root == RANK:
            same(reduced, product)
    same(comm.reduce_scatter(on_device(np.stack([each[RANK]] * SIZE), layout)), total[None])
    same(mine, each[RANK])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "f2", "f4", "f8", "c8"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1000, 3)])
def test_collectives(make, name, dtype, shape, layout):
    comm = make(name)

    def of(rank):
        return integers(shape, dtype, rank)

    mine, root = on_device(of(RANK), layout), SIZE - 1
    same(comm.bcast(mine if root == RANK else None, root=root), of(root))
    for rank, other in enumerate(comm.allgather(mine)):
        same(other, of(rank))
    for rank, other in enumerate(comm.gather(mine, root=root) or ()):
        same(other, of(rank))
    for rank, other in enumerate(comm.alltoall([mine] * SIZE)):
        same(other, of(rank))
    same(comm.scatter([mine] * SIZE if root == RANK else None, root=root), of(root))
    whole = on_device(np.stack([of(rank) for rank in range(SIZE)]), layout)
    same(comm.scatter(whole if root == RANK else None, root=root), of(RANK))
    if RANK == 0 and SIZE > 1:
        comm.send(mine, dest=1)
    if RANK == 1:
        same(comm.recv(source=0), of(0))
