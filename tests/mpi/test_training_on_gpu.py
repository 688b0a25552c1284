"""Training on devices, with every package: the parameters are those of the same training in host memory."""

import importlib.util
import shutil
import tempfile

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainer.training import extensions
from mpi4py import MPI

import mn_modelpar.functions as MF
from mn_compress import Int8, OneBit, PowerSGD, TopK
from mn_data import create_multi_node_iterator
from mn_extensions import create_multi_node_checkpointer, create_multi_node_evaluator
from mn_modelpar.links import MultiNodeBatchNormalization
from mn_optim import (
    AfterBackward,
    Asynchronous,
    DiLoCo,
    DuringBackward,
    LocalSGD,
    MultiNodeOptimizer,
    OneStepLate,
    Sharded,
    StreamingDiLoCo,
    SynchronousFirst,
)

cupy = pytest.importorskip("cupy")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sizes(4),
    pytest.mark.filterwarnings("ignore:gradients on devices are averaged through host memory"),
]

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SCHEMES = {
    "after backward": AfterBackward,
    "overlap": lambda: DuringBackward(bucket_bytes=200),
    "double buffering": OneStepLate,
    "sharded": lambda: Sharded(AfterBackward()),
    "sharded, overlap": lambda: Sharded(DuringBackward(bucket_bytes=200)),
    "local steps": lambda: LocalSGD(2),
    "DiLoCo": lambda: DiLoCo(2),
    "streaming DiLoCo": lambda: StreamingDiLoCo(3, fragments=2, delay=1),
    "int8": lambda: AfterBackward(send=Int8()),
    "int8, overlap": lambda: DuringBackward(send=Int8()),
    "one bit": lambda: AfterBackward(send=OneBit()),
    "top k": lambda: AfterBackward(send=TopK(0.5)),
    "PowerSGD": lambda: AfterBackward(send=PowerSGD(2)),
}
HALVES = ["float16", *(["bfloat16"] if importlib.util.find_spec("ml_dtypes") else [])]
several = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


class Net(chainer.Chain):
    """Linear links, a batch normalization over all ranks if there is a communicator, and one link without gradient."""

    def __init__(self, comm=None, dtype=np.float32):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        with chainer.using_config("dtype", dtype), self.init_scope():
            self.first = L.Linear(5, 8, initialW=initial)
            self.norm = MultiNodeBatchNormalization(8, comm) if comm else L.BatchNormalization(8)
            self.last = L.Linear(8, 3, initialW=initial)
            self.unused = L.Linear(3, 3, initialW=initial)
            self.dtype = chainer.get_dtype()

    def forward(self, x, t):
        loss = F.softmax_cross_entropy(self.last(F.tanh(self.norm(self.first(x.astype(self.dtype))))), t)
        chainer.report({"loss": loss}, self)
        return loss


def batch(step, rank=RANK):
    random = np.random.RandomState(100 * step + rank)
    return random.rand(6, 5).astype("f4"), random.randint(0, 3, 6).astype("i4")


def this_device(on_device):
    return chainer.get_device(f"@cupy:{cupy.cuda.Device().id}" if on_device else "@numpy")


def arrays_of(model):
    return {name: np.array(chainer.get_device("@numpy").send(param.array)) for name, param in model.namedparams()}


def train(comm, scheme, on_device, steps=6, dtype=np.float32, normalize=False, count=None):
    model = Net(comm if normalize else None, dtype)
    device = this_device(on_device)
    model.to_device(device)
    optimizer = MultiNodeOptimizer(chainer.optimizers.MomentumSGD(0.05), comm, scheme).setup(model)
    if dtype is not np.float32:
        optimizer.loss_scaling(scale=8)
    with optimizer.join():
        for step in range(steps if count is None else count):
            optimizer.update(model, *map(device.send, batch(step)))
    return arrays_of(model)


def close(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", ["pure_nccl", "flat"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(make, scheme, name):
    actual = train(make(name), SCHEMES[scheme](), True)
    for other in WORLD.allgather(actual):
        close(other, actual, 0)
    # Codes round what the order of additions has changed in the last digit.
    coarse = any(word in scheme for word in ("int8", "bit", "top", "Power"))
    close(actual, train(make("flat"), SCHEMES[scheme](), False), 0.05 if coarse else 1e-5)


@pytest.mark.skipif(SIZE < 4, reason="needs two nodes of two ranks")
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional", "pure_nccl"])
@pytest.mark.parametrize(
    "scheme", ["after backward", "overlap", "double buffering", "sharded, overlap", "int8, overlap"]
)
def test_schemes_on_two_nodes(on_nodes, devices, make, scheme, name):
    comm = on_nodes(name, 2, background="over" in scheme or "double" in scheme)
    actual = train(comm, SCHEMES[scheme](), True)
    comm.finalize()
    close(actual, train(make("flat"), SCHEMES[scheme](), False), 0.05 if "int8" in scheme else 1e-5)


@several
@pytest.mark.parametrize("when", [Asynchronous(max_staleness=2), SynchronousFirst(2, Asynchronous(max_staleness=2))])
@pytest.mark.parametrize("name", ["pure_nccl", "hierarchical", "non_cuda_aware"])
def test_asynchronous_averages_while_the_program_calls_nccl(make, when, name):
    """A thread averages while the program sends arrays: with NCCL on both, ranks would wait for each other forever."""
    comm = make(name)
    model = Net()
    device = this_device(True)
    model.to_device(device)
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.05), comm, when).setup(model)
    for step in range(20):
        optimizer.update(model, *map(device.send, batch(step)))
        total = comm.allreduce(cupy.full(1000, RANK + step, "f4"))
        assert float(total[0]) == sum(range(SIZE)) + SIZE * step
    optimizer.synchronize()
    actual = arrays_of(model)
    for other in WORLD.allgather(actual):
        close(other, actual, 0)
    assert all(np.isfinite(array).all() for array in actual.values())


@several
@pytest.mark.parametrize("name", ["pure_nccl", "hierarchical", "non_cuda_aware"])
@pytest.mark.parametrize("scheme", ["after backward", "overlap", "double buffering"])
def test_averaging_allocates_nothing_once_it_has_begun(make, scheme, name):
    """What CuPy's hooks of memory see in one step is what the same step without averaging allocates."""

    class Counting(cupy.cuda.memory_hook.MemoryHook):
        name = "Counting"
        count = 0

        def malloc_preprocess(self, **_):
            self.count += 1

    counts = []
    for averaged in (True, False):
        model = Net()
        device = this_device(True)
        model.to_device(device)
        optimizer = chainer.optimizers.SGD(0.05)
        if averaged:
            optimizer = MultiNodeOptimizer(optimizer, make(name), SCHEMES[scheme]())
        optimizer.setup(model)
        for step in range(8):
            with Counting() as counting:
                optimizer.update(model, *map(device.send, batch(step)))
        counts.append(counting.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", ["pure_nccl", "non_cuda_aware"])
@pytest.mark.parametrize("dtype", [np.float16, chainer.mixed16], ids=str)
@pytest.mark.parametrize("scheme", ["after backward", "overlap", "double buffering"])
def test_half_precision(make, scheme, dtype, name):
    actual = train(make(name), SCHEMES[scheme](), True, dtype=dtype)
    close(actual, train(make("flat"), SCHEMES[scheme](), False, dtype=dtype), 0.02)


@pytest.mark.parametrize("wire", HALVES)
@pytest.mark.parametrize("scheme", ["after backward", "overlap", "double buffering"])
@pytest.mark.parametrize("name", ["pure_nccl", "hierarchical", "non_cuda_aware"])
def test_what_is_sent_in_half_precision(make, scheme, wire, name):
    actual = train(make(name, allreduce_grad_dtype=wire), SCHEMES[scheme](), True)
    close(actual, train(make("flat"), SCHEMES[scheme](), False), 0.02)


@pytest.mark.parametrize("name", ["pure_nccl", "naive"])
def test_multi_node_batch_normalization(make, name):
    actual = train(make(name), AfterBackward(), True, normalize=True)
    close(actual, train(make("flat"), AfterBackward(), False, normalize=True))


@several
@pytest.mark.parametrize("scheme", ["after backward", "overlap", "double buffering"])
@pytest.mark.parametrize("name", ["pure_nccl", "non_cuda_aware"])
def test_ranks_that_end_early_join(make, scheme, name):
    actual = train(make(name), SCHEMES[scheme](), True, count=3 + RANK)
    close(actual, train(make("flat"), SCHEMES[scheme](), False, count=3 + RANK))


def test_data_evaluator_and_checkpoint(make):
    """A whole trainer, which is interrupted and resumed from a checkpoint of arrays on the device."""
    random = np.random.RandomState(0)
    examples = list(zip(random.rand(48, 5).astype("f4"), random.randint(0, 3, 48).astype("i4"), strict=True))
    folder = WORLD.bcast(tempfile.mkdtemp() if RANK == 0 else None)

    def run(comm, on_device, iterations, run_name=None):
        device = this_device(on_device)
        device.use()
        model = Net()
        model.to_device(device)
        optimizer = MultiNodeOptimizer(chainer.optimizers.MomentumSGD(0.05), comm).setup(model)
        data = chainermn.scatter_dataset(examples if RANK == 0 else None, comm)
        iterator = chainer.iterators.SerialIterator(data, 4, shuffle=False)
        updater = chainer.training.StandardUpdater(iterator, optimizer, device=device)
        trainer = chainer.training.Trainer(updater, (iterations, "iteration"), folder)
        test = chainer.iterators.SerialIterator(data, 4, repeat=False, shuffle=False)
        evaluator = create_multi_node_evaluator(extensions.Evaluator(test, model, device=device), comm)
        if run_name:
            saver = create_multi_node_checkpointer(run_name, comm, path=folder)
            trainer.extend(saver, trigger=(1, "iteration"))
            saver.maybe_load(trainer, optimizer)
        trainer.run()
        return arrays_of(model), evaluator()["main/loss"]

    expected, loss = run(make("flat"), False, 6)
    run(make("naive"), True, 3, "run")
    actual, device_loss = run(make("naive"), True, 6, "run")
    close(actual, expected, 1e-4)
    assert float(device_loss) == pytest.approx(float(loss), rel=1e-4)
    WORLD.Barrier()
    if RANK == 0:
        shutil.rmtree(folder)


def test_an_iterator_that_one_rank_reads(make):
    device = this_device(True)
    examples = [np.full(3, i, "f4") for i in range(8)]
    iterator = chainer.iterators.SerialIterator(examples, 4, shuffle=False)
    iterator = create_multi_node_iterator(iterator, make("naive"))
    found = chainer.dataset.concat_examples(next(iterator), device)
    assert found.device.id == device.device.id
    np.testing.assert_array_equal(found.get(), np.stack(examples[:4]))


@several
@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
def test_a_model_that_spans_two_ranks(make, name):
    comm = make(name)
    found = []
    for on_device in (False, True):
        device = this_device(on_device)
        device.use()
        link = L.Linear(5, 5, initialW=np.random.RandomState(RANK).rand(5, 5).astype("f4"))
        link.to_device(device)
        if RANK == 0:
            x = device.send(batch(0, 0)[0])
            MF.send(F.tanh(link(x)), comm, 1).backward()
        elif RANK == 1:
            F.sum(link(MF.recv(comm, 0))).backward()
        found.append(None if RANK > 1 else chainer.get_device("@numpy").send(link.W.grad))
    if RANK <= 1:
        np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
def test_collective_functions(make, name):
    comm, found = make(name), []
    for on_device in (False, True):
        device = this_device(on_device)
        device.use()
        x = chainer.Variable(device.send(batch(0)[0]))
        gathered = MF.allgather(comm, x)
        own = MF.alltoall(comm, [x * (rank + 1) for rank in range(SIZE)])
        total = sum(F.sum(each * each) for each in (*gathered, *own))
        total.backward()
        found.append(chainer.get_device("@numpy").send(x.grad))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.parametrize("scheme", ["overlap", "double buffering", "sharded"])
def test_an_exception_in_the_backward_pass(make, scheme):
    found = []
    for on_device in (False, True):
        device = this_device(on_device)
        device.use()
        model = Net()
        model.to_device(device)
        optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.1), make("naive"), SCHEMES[scheme]()).setup(model)

        def fail(x, t):
            raise ArithmeticError("on every rank")

        for step in range(4):
            optimizer.update(model, *map(device.send, batch(step)))
            with pytest.raises(ArithmeticError):
                optimizer.update(fail, *map(device.send, batch(step)))
        found.append(arrays_of(model))
    close(found[1], found[0])
