"""Makes every collective call of the packages with rank 1 late, and prints how rank 0 waits in each.

``watched_calls.py FREE…`` runs on two ranks, and is told in which calls rank 0 should wait for nobody.
``watched_calls.py names`` prints, without MPI, the calls that it contains. test_watched.py runs both.
"""

import sys
import time
from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainermn.iterators import create_multi_node_iterator, create_synchronized_iterator

import mn_comm
from mn_comm.building_blocks import Ranks, synchronize_replicas
from mn_optim import DuringBackward, LocalSGD, MultiNodeOptimizer, OneStepLate, Sharded, create_multi_node_optimizer

LATEST = 8.0  # seconds for which rank 1 waits until rank 0's monitor has printed a message, or its call has ended
ONES = np.ones(4, "f4")
DATA = chainer.datasets.TupleDataset(np.ones((20, 4), "f4"), np.zeros(20, "i4"))
SGD = chainer.optimizers.SGD


def iterator(**options):
    return chainer.iterators.SerialIterator(DATA, 2, **options)


def model():
    made = L.Classifier(L.Linear(4, 2))
    for param in made.params():
        param.grad = np.zeros_like(param.data)
    return made


def optimizer(when=True):
    return MultiNodeOptimizer(SGD(), comm, when).setup(model())


def then(made, call):
    """Return a call that uses an object which all ranks have created."""
    return lambda: call(made)


def update(made, times=0):
    """Return an update, after some others."""

    def call():
        made.update(made.target, np.ones((2, 4), "f4"), np.zeros(2, "i4"))

    for _ in range(times):
        call()
    return call


def trainer(made=None):
    updater = chainer.training.StandardUpdater(iterator(), made or optimizer())
    return chainer.training.Trainer(updater, (1, "epoch"), out="result")


def with_trainer(extension):
    """Return a call of an extension with a trainer that all ranks have created."""
    made = trainer()
    made.observation = {"loss": 1.0}
    made._start_at = time.time()
    made.updater.iteration = 1
    return lambda: extension(made)


def backward(variable):
    return F.sum(variable).backward


def reduction():
    reducer, target = comm.gradient_reducer(background=True), model()

    def call():
        started = reducer.start(target)
        started.ready_all()
        started.wait()

    return call


def with_hook(hook):
    return comm.gradient_reducer(comm_hook=hook)


def raising():
    def call():
        with mn_comm.raise_on_all(comm):
            pass

    return call


def evaluator(create):
    return create(chainer.training.extensions.Evaluator(iterator(repeat=False), model()), comm)


class Generic(chainermn.extensions.GenericMultiNodeEvaluator):
    def calc_local(self, *args, **kwargs):
        return 1.0

    def aggregate(self, results):
        return {"mean": np.mean(results)}


def checkpointer():
    return chainermn.create_multi_node_checkpointer("run", comm, path="result")


def multi_node(create, call):
    made = create(iterator(), comm, **({"rank_master": 1} if create is create_multi_node_iterator else {}))
    return then(made, call)


def batch_normalization():
    link = chainermn.links.MultiNodeBatchNormalization(4, comm)
    return lambda: link(np.ones((2, 4), "f4"))


# For each name, a function that every rank calls first, and that returns the watched call. Rank 0 waits in this call,
# so it is never the root that sends.
CALLS = {
    "create_communicator": lambda: then(world.Dup(), lambda made: mn_comm.create_communicator("hierarchical", made)),
    "Communicator.split": lambda: lambda: comm.split(0, comm.rank),
    "Communicator.barrier": lambda: comm.barrier,
    "Communicator.bcast": lambda: lambda: comm.bcast(ONES, root=1),
    "Communicator.gather": lambda: lambda: comm.gather(ONES),
    "Communicator.allgather": lambda: lambda: comm.allgather(ONES),
    "Communicator.scatter": lambda: lambda: comm.scatter([ONES, ONES], root=1),
    "Communicator.alltoall": lambda: lambda: comm.alltoall((ONES, ONES)),
    "Communicator.allreduce": lambda: lambda: comm.allreduce(ONES),
    "Communicator.reduce": lambda: lambda: comm.reduce(ONES),
    "Communicator.reduce_scatter": lambda: lambda: comm.reduce_scatter(ONES),
    "Communicator.bcast_obj": lambda: lambda: comm.bcast_obj("object", root=1),
    "Communicator.gather_obj": lambda: lambda: comm.gather_obj("object"),
    "Communicator.allgather_obj": lambda: lambda: comm.allgather_obj("object"),
    "Communicator.scatter_obj": lambda: lambda: comm.scatter_obj(["one", "other"], root=1),
    "Communicator.allreduce_obj": lambda: lambda: comm.allreduce_obj(1),
    "Communicator.bcast_data": lambda: lambda: comm.bcast_data(model()),
    "Communicator.multi_node_mean_grad": lambda: lambda: comm.multi_node_mean_grad(model()),
    "Communicator.gradient_reducer": lambda: lambda: comm.gradient_reducer(background=True),
    "Communicator.recv": lambda: lambda: comm.recv(1) if comm.rank == 0 else comm.send(ONES, 0),
    "Communicator.recv_obj": lambda: lambda: comm.recv_obj(1) if comm.rank == 0 else comm.send_obj(1, 0),
    "AnyBucket.average": lambda: then(with_hook(lambda bucket: bucket.average()), lambda made: made.average(model())),
    "AnyBucket.average_in_place": lambda: then(comm.gradient_reducer(), lambda made: made.average(model())),
    "AnyBucket.launch": reduction,
    "GradientReducer.average": lambda: then(comm.gradient_reducer(), lambda made: made.average(model())),
    "GradientReducer.start": reduction,
    "GradientReducer.agree_on": lambda: then(comm.gradient_reducer(), lambda made: made.agree_on("test", None)),
    "GradientReducer.exchange_messages": lambda: then(updated(), join),
    "Communicator.all_gather_owned": lambda: lambda: comm.all_gather_owned([("W", ONES.copy())], [1]),
    "expect_same": lambda: lambda: mn_comm.expect_same(comm, "number", 1),
    "raise_on_all": raising,
    "transact": lambda: lambda: mn_comm.transact(comm, comm.barrier),
    "synchronize_replicas": lambda: then(updated(LocalSGD(4)), lambda made: synchronize_replicas(made.target)),
    "Ranks": lambda: Ranks(comm.mpi_comm).Barrier,
    "create_multi_node_optimizer": lambda: lambda: create_multi_node_optimizer(SGD(), comm, double_buffering=True),
    "MultiNodeOptimizer": lambda: lambda: optimizer(DuringBackward()),
    "MultiNodeOptimizer.consolidate": lambda: updated(Sharded()).consolidate,
    "MultiNodeOptimizer.update": lambda: update(optimizer()),
    "MultiNodeOptimizer.update, second": lambda: update(optimizer(), 1),
    "MultiNodeOptimizer.update, overlap": lambda: update(optimizer(DuringBackward())),
    "MultiNodeOptimizer.update, overlap, second": lambda: update(optimizer(DuringBackward()), 1),
    "MultiNodeOptimizer.update, double_buffering": lambda: update(optimizer(OneStepLate())),
    "MultiNodeOptimizer.update, double_buffering, third": lambda: twice(update(optimizer(OneStepLate()), 2)),
    "MultiNodeOptimizer.update, local_steps": lambda: update(optimizer(LocalSGD(1)), 1),
    "MultiNodeOptimizer.update_without_data": lambda: then(joined(), lambda made: made.update_without_data()),
    "MultiNodeUpdater.update_core": lambda: chainermn.MultiNodeUpdater(iterator(), updated()).update_core,
    "MultiNodeOptimizer.synchronize": lambda: updated(LocalSGD(4)).synchronize,
    "scatter_dataset": lambda: lambda: chainermn.scatter_dataset(DATA, comm),
    "scatter_index": lambda: lambda: chainermn.scatter_index(20, comm, root=1),
    "get_epoch_trigger": lambda: lambda: chainermn.get_epoch_trigger(1, DATA, 2, comm),
    "get_n_iterations_for_one_epoch": lambda: lambda: chainermn.get_n_iterations_for_one_epoch(DATA, 2, comm),
    "create_synchronized_iterator": lambda: lambda: create_synchronized_iterator(iterator(), comm),
    "create_uneven_iterator": lambda: lambda: chainermn.iterators.create_uneven_iterator(iterator(), comm),
    "create_multi_node_iterator": lambda: lambda: create_multi_node_iterator(iterator(), comm, rank_master=1),
    "create_multi_node_iterator, next": lambda: multi_node(create_multi_node_iterator, next),
    "create_multi_node_iterator, reset": lambda: multi_node(create_multi_node_iterator, lambda made: made.reset()),
    "ElasticIterator": lambda: lambda: chainermn.iterators.ElasticIterator(DATA, 2, comm),
    "create_multi_node_evaluator": lambda: evaluator(chainermn.create_multi_node_evaluator),
    "GenericMultiNodeEvaluator": lambda: with_trainer(Generic(comm, iterator(repeat=False), model())),
    "create_memory_keeper": lambda: lambda: chainermn.extensions.create_memory_keeper(comm),
    "create_multi_node_checkpointer": lambda: checkpointer,
    "create_multi_node_checkpointer, maybe_load": lambda: then(checkpointer(), lambda made: made.maybe_load(trainer())),
    "create_multi_node_checkpointer, save": lambda: with_trainer(checkpointer()),
    "multi_node_snapshot": lambda: lambda: snapshot([[0, 1]]),
    "multi_node_snapshot, initialize": lambda: with_trainer(snapshot([[0, 1]], autoload=True).initialize),
    "multi_node_snapshot, save": lambda: with_trainer(snapshot([[1, 0]])),
    "AllreducePersistent": lambda: chainermn.extensions.AllreducePersistent(normalized(), comm),
    "ObservationAggregator": lambda: with_trainer(chainermn.extensions.ObservationAggregator(comm, "loss")),
    "MultiNodeEarlyStoppingTrigger": lambda: with_trainer(
        chainermn.extensions.MultiNodeEarlyStoppingTrigger(comm, monitor="loss", check_trigger=(1, "iteration"))
    ),
    "functions.allgather": lambda: lambda: chainermn.functions.allgather(comm, ONES),
    "functions.alltoall": lambda: lambda: chainermn.functions.alltoall(comm, (ONES, ONES)),
    "functions.allreduce": lambda: lambda: chainermn.functions.allreduce(comm, ONES),
    "functions.allreduce, backward": lambda: backward(chainermn.functions.allreduce(comm, variable())),
    "functions.reduce_scatter": lambda: lambda: chainermn.functions.reduce_scatter(comm, (ONES, ONES)),
    "functions.bcast": lambda: lambda: chainermn.functions.bcast(comm, ONES, root=1),
    "functions.gather": lambda: lambda: chainermn.functions.gather(comm, ONES),
    "functions.scatter": lambda: lambda: chainermn.functions.scatter(comm, (ONES, ONES), root=1),
    "functions.recv": lambda: lambda: receive_or_send(),
    "MultiNodeBatchNormalization.forward": batch_normalization,
    "Communicator.finalize": lambda: mn_comm.create_communicator("flat").finalize,
}


def variable():
    return chainer.Variable(ONES.copy())


def normalized():
    return L.Classifier(L.BatchNormalization(4))


def snapshot(replicas, **options):
    return chainermn.extensions.multi_node_snapshot(comm, chainer.training.extensions.snapshot(**options), replicas)


def updated(when=True):
    """Return an optimizer after some updates."""
    made = optimizer(when)
    update(made, 2)
    return made


def join(made):
    """Reach the end of a joined loop."""
    with made.join():
        pass


def joined():
    """Return an optimizer whose ranks may have no data."""
    made = updated()
    made.join_in_steps()
    return made


def twice(call):
    def both():
        call()
        call()

    return both


def receive_or_send():
    if comm.rank == 0:
        return chainermn.functions.recv(comm, 1)
    return chainermn.functions.send(variable(), comm, 0)


def try_out(call, number, is_free):
    """Make a call, on rank 1 only after rank 0's monitor has printed a message; return how it was watched on rank 0.

    In a call that should wait for nobody, the monitor may also print one, if another program has rank 0's core. So rank
    1 then makes the call only after rank 0's has ended.
    """
    heard, called, ended = (Path(f"{what}-{number}") for what in ("heard", "called", "ended"))
    world.Barrier()
    if world.rank == 0:
        guard_thread.thread.find(stall.Monitor)._write = lambda _: heard.touch()
        call()
        how = ("watched" if heard.exists() else "waits unwatched") if called.exists() else "waits for nobody"
        ended.touch()
        return how
    deadline = time.monotonic() + LATEST
    while not ended.exists() and (is_free or not heard.exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    called.touch()
    call()
    return ""


if __name__ == "__main__":
    if sys.argv[1:] == ["names"]:
        print("\n".join(CALLS))
        sys.exit()
    from mpi4py import MPI

    from mn_guard import guard_thread, stall

    world = MPI.COMM_WORLD.Dup()
    comm = mn_comm.create_communicator("flat")
    for number, (name, prepare) in enumerate(CALLS.items()):
        how = try_out(prepare(), number, is_free=name in sys.argv)
        if world.rank == 0:
            print(f"{name}: {how}", flush=True)
