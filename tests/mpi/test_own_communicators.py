"""Communicators that a script derives from ours: code that takes a communicator uses their methods."""

import chainer
import chainermn
import numpy as np
import pytest
from chainer.training import extensions
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.naive_communicator import NaiveCommunicator
from mpi4py import MPI

import mn_comm
from mn_optim import DuringBackward, MultiNodeOptimizer

WORLD = MPI.COMM_WORLD.Dup()
RANK, SIZE = WORLD.rank, WORLD.size


class Plain(CommunicatorBase):
    """Has the abstract methods of ChainerMN 7.8.1, the numbers, and nothing else; there is no ``mpi_comm``."""

    rank, size = RANK, SIZE
    intra_rank, intra_size, inter_rank, inter_size = RANK, SIZE, 0, 1

    def __init__(self, world=WORLD):
        self.called = []
        self._world = world

    def __getattribute__(self, name):
        if not name.startswith("_") and name not in ("called", "rank", "size"):
            self.called.append(name)
        return super().__getattribute__(name)

    def split(self, color, key):
        return Plain(self._world.Split(color, key))

    def alltoall(self, xs):
        return tuple(self._world.alltoall(xs))

    def send(self, data, dest, tag):
        self._world.send(data, dest, tag)

    def recv(self, source, tag):
        return self._world.recv(source=source, tag=tag)

    def bcast(self, data, max_buf_len=None, root=0):
        return self._world.bcast(data, root)

    def gather(self, data, root=0):
        return self._world.gather(data, root)

    def allgather(self, x):
        return tuple(self._world.allgather(x))

    def allreduce(self, data):
        return sum(self._world.allgather(data))

    def scatter(self, xs, root=0):
        return self._world.scatter(xs, root)

    def send_obj(self, obj, dest, tag):
        self._world.send(obj, dest, tag)

    def recv_obj(self, source, tag):
        return self._world.recv(source=source, tag=tag)

    def bcast_obj(self, obj, max_buf_len=None, root=0):
        assert (obj is None) == (self.rank != root)
        return self._world.bcast(obj, root)

    def gather_obj(self, obj, root=0):
        return self._world.gather(obj, root)

    def allreduce_obj(self, obj):
        return self._world.allreduce(obj)

    def bcast_data(self, model):
        for _, param in sorted(model.namedparams()):
            param.data[...] = self._world.bcast(param.data)

    def multi_node_mean_grad(self, model, zero_fill=False):
        for _, param in sorted(model.namedparams()):
            param.grad[...] = self._world.allreduce(param.grad) / self._world.size


class OfVersion1(Plain):
    """As in ChainerMN 1; not abstract either."""

    def allreduce_grad(self, model):
        Plain.multi_node_mean_grad(self, model)


class JustVersion1(CommunicatorBase):
    """Has everything except the abstract method that ChainerMN 1 had under another name."""

    for _name in CommunicatorBase.__abstractmethods__ - {"multi_node_mean_grad"}:
        locals()[_name] = getattr(Plain, _name)

    def allreduce_grad(self, model):
        self.grads = [None if param.grad is None else param.grad.copy() for param in model.params()]


class OneByOne(MpiCommunicatorBase):
    """Averages arrays in its own way."""

    def __init__(self, mpi_comm):
        super().__init__(mpi_comm)
        self.shapes = []

    def _multi_node_mean(self, sendbuf, recvbuf):
        self.shapes.append(recvbuf.shape)
        super()._multi_node_mean(sendbuf, recvbuf)


class Own(MpiCommunicatorBase):
    """Averages models in its own way, and has a setting."""

    def __init__(self, mpi_comm=WORLD):
        super().__init__(mpi_comm)
        with self.config_scope():
            self.loudness = 1

    def multi_node_mean_grad(self, model, zero_fill=False):
        for _, param in sorted(model.namedparams()):
            self._multi_node_mean(None, param.grad)
            param.grad *= self.loudness


def model():
    link = chainer.Sequential(chainer.links.Linear(3, 2))
    for param in link.params():
        param.grad = np.full(param.shape, RANK, "f4")
    return link


def means(link):
    return [float(param.grad.flat[0]) for param in link.params()]


def test_abstract_is_what_was():
    assert CommunicatorBase.__abstractmethods__ == {
        *("split alltoall send recv bcast gather allgather allreduce scatter".split()),
        *("send_obj recv_obj bcast_obj gather_obj allreduce_obj bcast_data multi_node_mean_grad".split()),
    }


def test_numbers_that_a_derived_class_does_not_have():
    class Nothing(CommunicatorBase):
        for _name in CommunicatorBase.__abstractmethods__:
            locals()[_name] = None

    nothing = Nothing()
    for name in ("rank", "size", "intra_rank", "intra_size", "inter_rank", "inter_size"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(nothing, name)
    nothing.finalize()
    assert nothing.get_config() == {}
    with pytest.raises(ValueError, match="expected the name of a setting, but Nothing has none; got 'batched_copy'"):
        nothing.set_config("batched_copy", value=True)
    with pytest.raises(ValueError, match="expected the name of a setting"):
        nothing.get_config("batched_copy")


@pytest.mark.parametrize("kind", [Plain, OfVersion1])
def test_training_with_methods_only(kind):
    comm = kind()
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(lr=1), comm).setup(model())
    link = optimizer.target
    optimizer.update()
    reference = [param.array.copy() for param in link.params()]
    optimizer.update()
    for param, before in zip(link.params(), reference, strict=True):
        np.testing.assert_allclose(param.array, before - (SIZE - 1) / 2, rtol=1e-6)
        assert all(np.array_equal(param.array, other) for other in WORLD.allgather(param.array))
    assert {"bcast_data", "multi_node_mean_grad"} <= set(comm.called)
    assert "mpi_comm" not in comm.called


def test_allreduce_grad_of_version_1_takes_the_place_of_the_abstract_method():
    comm = JustVersion1()
    link = model()
    next(link.params()).grad = None
    comm.multi_node_mean_grad(link)
    assert sum(grad is None for grad in comm.grads) == 1
    comm.multi_node_mean_grad(link, zero_fill=True)
    assert not any(grad is None for grad in comm.grads)


def test_scatter_dataset_with_methods_only():
    comm = Plain()
    data = np.arange(4 * SIZE) if RANK == 0 else None
    for force_equal_length in (True, False):
        part = chainermn.scatter_dataset(data, comm, force_equal_length=force_equal_length)
        assert list(part) == list(range(4 * RANK, 4 * RANK + 4))
    assert chainermn.scatter_index(4 * SIZE, comm) == (4 * RANK, 4 * RANK + 4)
    assert "mpi_comm" not in comm.called


def test_evaluators_with_methods_only():
    comm = Plain()

    class Fixed(extensions.Evaluator):
        def evaluate(self):
            return {"main/loss": float(RANK)}

    iterator = chainer.iterators.SerialIterator([1], 1, repeat=False)
    evaluator = chainermn.create_multi_node_evaluator(Fixed(iterator, chainer.links.Linear(1, 1)), comm)
    assert evaluator.evaluate() == {"main/loss": (SIZE - 1) / 2}

    class Generic(chainermn.extensions.GenericMultiNodeEvaluator):
        def calc_local(self, x):
            return RANK

        def aggregate(self, results):
            return sorted(results)

    generic = Generic(comm, chainer.iterators.SerialIterator([np.zeros(1)], 1, repeat=False, shuffle=False), None)
    assert generic(None) == (list(range(SIZE)) if RANK == 0 else None)
    assert "mpi_comm" not in comm.called


@pytest.mark.skipif(SIZE < 2, reason="needs a neighbour")
def test_model_parallel_functions_with_methods_only():
    comm = Plain()
    x = chainer.Variable(np.full((2, 3), RANK, "f4"))
    if RANK == 0:
        delegate = chainermn.functions.send(x, comm, 1)
        delegate.backward()
        np.testing.assert_array_equal(x.grad, np.full((2, 3), 5, "f4"))
    elif RANK == 1:
        received = chainermn.functions.recv(comm, 0)
        chainer.functions.sum(received * 5).backward()
    y = chainer.Variable(np.full(3, RANK + 1, "f4"))
    everything = chainermn.functions.allgather(comm, y)
    chainer.functions.sum(sum(everything)).backward()
    np.testing.assert_array_equal(y.grad, np.full(3, SIZE, "f4"))
    first = chainermn.functions.bcast(comm, y if RANK == SIZE - 1 else None, root=SIZE - 1)
    np.testing.assert_array_equal(first.array, np.full(3, SIZE, "f4"))
    link = chainermn.links.MultiNodeBatchNormalization(3, comm)
    assert link(np.full((2, 3), RANK, "f4")).shape == (2, 3)
    np.testing.assert_allclose(link.avg_mean, np.full(3, 0.1 * (SIZE - 1) / 2), rtol=1e-5)
    assert "mpi_comm" not in comm.called


@pytest.mark.parametrize("zero_fill", [False, True])
def test_own_mean_of_an_array(zero_fill):
    comm = OneByOne(WORLD)
    link = model()
    comm.multi_node_mean_grad(link, zero_fill)
    assert means(link) == [(SIZE - 1) / 2] * 2
    assert comm.shapes == [(2, 3), (2,)]
    link.cleargrads()
    comm.multi_node_mean_grad(link, zero_fill)
    assert [param.grad is None for param in link.params()] == [not zero_fill] * 2


@pytest.mark.skipif(SIZE < 2, reason="one rank agrees with itself")
def test_own_mean_of_an_array_where_ranks_differ():
    link = model()
    if RANK == 1:
        link[0].b.grad = None
    with pytest.raises(ValueError, match="expected the same parameters on every rank, but rank 1 differs from rank 0"):
        OneByOne(WORLD).multi_node_mean_grad(link)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_mean_of_an_array(dtype):
    comm = NaiveCommunicator(WORLD)
    sendbuf, recvbuf = np.full((2, 3), 30000 + 16 * RANK, dtype), np.zeros((3, 2), dtype).T
    comm._multi_node_mean(sendbuf, recvbuf)
    np.testing.assert_array_equal(recvbuf, np.full((2, 3), np.array(30000 + 8 * (SIZE - 1), dtype)))
    np.testing.assert_array_equal(sendbuf, np.full((2, 3), 30000 + 16 * RANK, dtype))
    comm._multi_node_mean(None, sendbuf)
    np.testing.assert_array_equal(sendbuf, recvbuf)


def test_own_mean_of_a_model_and_own_settings():
    comm = Own()
    link = model()
    with comm.config_scope():
        comm.loudness = 3
        comm.batched_copy = False
    assert not comm.within_config_scope
    comm.note = "no setting"
    assert comm.get_config() == {"loudness": 3, "batched_copy": False, "allreduce_grad_dtype": None}
    assert comm.get_config("loudness") == 3
    comm.multi_node_mean_grad(link)
    assert means(link) == [3 * (SIZE - 1) / 2] * 2
    half = comm.split(RANK % 2, RANK)
    assert type(half) is Own
    assert half.size == (SIZE + 1 - RANK % 2) // 2
    assert half.loudness == half.get_config("loudness") == 3
    assert half.batched_copy is False
    half.batched_copy = True
    half.loudness = 2  # outside of the scope it is an attribute
    assert (half.get_config("loudness"), half.get_config("batched_copy")) == (3, True)
    assert comm.batched_copy is False


def test_what_has_its_own_way_to_average_cannot_do_so_in_the_background():
    for kind in (Own, OneByOne):
        with pytest.raises(NotImplementedError, match=f"{kind.__name__} cannot average gradients in the background"):
            MultiNodeOptimizer(chainer.optimizers.SGD(), kind(WORLD), DuringBackward())


def test_a_way_to_average_that_comes_from_another_class():
    class Mixin:
        def _multi_node_mean(self, sendbuf, recvbuf):
            recvbuf[...] = 7

    class Mixed(Mixin, NaiveCommunicator):
        pass

    link = model()
    Mixed(WORLD).multi_node_mean_grad(link)
    assert means(link) == [7, 7]


def test_allreduce_grad_of_version_1_over_mpi():
    class Base(MpiCommunicatorBase):
        def __init__(self, mpi_comm=WORLD):
            super().__init__(mpi_comm)

    class Version1(Base):
        def allreduce_grad(self, model):
            for param in model.params():
                param.grad[...] = 5

    class Logged(NaiveCommunicator):
        """Overrides an old method that no code calls, and that calls the new one."""

        def allreduce_grad(self, model, zero_fill=False):
            super().allreduce_grad(model, zero_fill)

    link = model()
    Version1().multi_node_mean_grad(link)
    assert means(link) == [5, 5]
    link = model()
    with pytest.warns(DeprecationWarning, match="old name"):
        Logged(WORLD).allreduce_grad(link)
    assert means(link) == [(SIZE - 1) / 2] * 2


def test_no_mpi_comm():
    with pytest.raises(TypeError, match="expected an mpi4py intracommunicator for mpi_comm, got NoneType"):
        MpiCommunicatorBase(None)


def test_epochs_with_methods_only():
    with pytest.warns(DeprecationWarning, match="use epoch triggers"):
        assert chainermn.get_epoch_trigger(2, range(5 + RANK), 2, Plain()) == (6, "iteration")


def test_without_a_way_to_average_it_is_that_of_naive():
    class Nothing(MpiCommunicatorBase):
        pass

    link = model()
    Nothing(WORLD).multi_node_mean_grad(link)
    assert means(link) == [(SIZE - 1) / 2] * 2


def test_another_mpi_comm():
    comm = mn_comm.create_communicator("flat", WORLD)
    link = model()
    comm.multi_node_mean_grad(link)
    half = WORLD.Split(RANK % 2, RANK)
    comm.mpi_comm = half
    assert comm.mpi_comm is half
    assert (comm.rank, comm.size) == (half.rank, half.size)
    assert comm.allreduce(np.array([RANK])) == sum(range(RANK % 2, SIZE, 2))
    link = model()
    comm.multi_node_mean_grad(link)
    assert means(link) == [np.mean(range(RANK % 2, SIZE, 2))] * 2


def test_arguments_by_name():
    comm = chainermn.create_communicator("naive")
    x = np.arange(3)
    assert comm.bcast(x=x if RANK == 0 else None, root=0).shape == (3,)
    assert len(comm.gather(x=x, root=0) or ()) == (SIZE if RANK == 0 else 0)
    assert len(comm.allgather(x=x)) == SIZE
    assert (comm.allreduce(x=x) == SIZE * x).all()
    assert comm.scatter(xs=[x] * SIZE if RANK == 0 else None, root=0).shape == (3,)
    assert len(comm.alltoall(xs=[x] * SIZE)) == SIZE
    assert comm.bcast_obj(obj=1 if RANK == 0 else None, max_buf_len=None, root=0) == 1
    with pytest.raises(TypeError, match="expected the name and value of a setting, got dtype as well"):
        comm.set_config("batched_copy", False, dtype=None)
