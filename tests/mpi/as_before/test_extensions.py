import shutil
import tempfile
from pathlib import Path
from unittest import mock

import chainer
import chainer.functions as F
import chainer.links as L
import chainer.testing
import chainermn
import numpy as np
import pytest
from chainer.training import extensions
from chainermn.extensions import (
    AllreducePersistent,
    GenericMultiNodeEvaluator,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
    multi_node_snapshot,
)

pytestmark = pytest.mark.sizes(1, 4)

COMM = chainermn.create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
MEAN = (SIZE - 1) / 2


@pytest.fixture
def folder():
    """One empty folder for all ranks."""
    path = COMM.bcast_obj(tempfile.mkdtemp() if RANK == 0 else None)
    yield Path(path)
    COMM.mpi_comm.Barrier()
    if RANK == 0:
        shutil.rmtree(path)


class Stub:
    """Only what triggers and the aggregator need of a trainer."""

    def __init__(self, per_epoch):
        self.observation = {}
        self.updater = mock.MagicMock(iteration=0, epoch=0, epoch_detail=0.0, previous_epoch_detail=0.0)
        self.per_epoch = per_epoch

    def step(self, **observation):
        self.updater.iteration += 1
        self.updater.previous_epoch_detail = self.updater.epoch_detail
        self.updater.epoch_detail = self.updater.iteration / self.per_epoch
        self.updater.epoch = int(self.updater.epoch_detail)
        self.updater.is_new_epoch = self.updater.iteration % self.per_epoch == 0
        self.observation = {f"main/{name}": value for name, value in observation.items()}


# Variables, which the old one takes where ChainerX is there only, are in the tests of mn-extensions.
@pytest.mark.parametrize("kind", [float, np.float32, lambda x: np.array(x, "f4")], ids=["float", "number", "array"])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_observations_with_a_stub_for_the_trainer(interval, kind):
    trainer = Stub(2)
    aggregator = ObservationAggregator(COMM, "main/x", "main/mean", comm_trigger=(interval, "iteration"))
    for i in range(1, 7):
        trainer.step(x=kind(i + RANK))
        aggregator(trainer)
        assert ("main/mean" in trainer.observation) is (i % interval == 0)
        if i % interval == 0:
            chainer.testing.assert_allclose(trainer.observation["main/mean"], i - (interval - 1) / 2 + MEAN)


def test_an_observation_replaced_by_its_mean_every_epoch():
    trainer = Stub(2)
    trainer.updater.get_all_optimizers.return_value = {}
    aggregator = ObservationAggregator(COMM, "main/x", comm_trigger=(1, "epoch"))
    for i in range(1, 5):
        trainer.step(x=i + RANK)
        aggregator(trainer)
        assert trainer.observation["main/x"] == (i + RANK if i % 2 else i - 0.5 + MEAN)


def test_an_aggregator_of_the_scripts_own():
    trainer = Stub(2)
    aggregator = ObservationAggregator(
        COMM, "main/x", "all", comm_trigger=(2, "iteration"), aggregator=lambda xs: [max(x) for x in xs]
    )
    trainer.step(x=RANK)
    assert aggregator.compute_summary(trainer) is None
    trainer.step(x=10 - RANK)
    assert aggregator.compute_summary(trainer) == [max(rank, 10 - rank) for rank in range(SIZE)]


@pytest.mark.parametrize("value", ["text", 3, 0.5, np.float32(2), np.arange(3)])
def test_observations_come_to_the_aggregator_as_they_are(value):
    seen = []
    trainer = Stub(1)
    trainer.step(x=value)
    ObservationAggregator(COMM, "main/x", aggregator=lambda xs: seen.extend(xs) or 0)(trainer)
    assert len(seen) == (SIZE if RANK == 0 else 0)
    for (each,) in seen:
        assert type(each) is type(value)
        np.testing.assert_array_equal(each, value)


def communicator_that_is_a_mock(rank=0, size=1):
    """It has the methods that the old extensions call, for ranks that all have the same data."""
    comm = mock.MagicMock(rank=rank, size=size)
    comm.gather_obj.side_effect = lambda obj, root=0: [obj] * size
    comm.bcast_obj.side_effect = lambda obj, root=0, **options: obj
    return comm


def test_extensions_with_a_communicator_that_is_a_mock():
    comm = communicator_that_is_a_mock(size=2)
    trainer = Stub(1)
    trainer.step(x=1.5)
    ObservationAggregator(comm, "main/x", "mean")(trainer)
    assert trainer.observation["mean"] == 1.5
    extension = multi_node_snapshot(comm, extensions.snapshot(filename="s"), [0])
    assert (extension.is_master, extension.replica_set) == (True, {0})
    iterator = chainer.iterators.SerialIterator([1, 2], 1, repeat=False, shuffle=False)
    evaluator = GenericMultiNodeEvaluator(communicator_that_is_a_mock(), iterator, lambda x: int(x[0]))
    assert evaluator(None) == [1, 2]


def test_observations_in_a_trainer_with_a_mock_updater(folder):
    stub = Stub(2)
    stub.updater.update = stub.step
    trainer = chainer.training.Trainer(stub.updater, (3, "iteration"), out=str(folder))
    seen = []
    trainer.extend(
        lambda trainer: trainer.observation.update({"x": RANK + trainer.updater.iteration}),
        name="observe",
        trigger=(1, "iteration"),
        priority=chainer.training.PRIORITY_WRITER,
    )
    trainer.extend(ObservationAggregator(COMM, "x", "mean"))
    trainer.extend(lambda t: seen.append(t.observation["mean"]), name="look", trigger=(1, "iteration"), priority=0)
    trainer.run()
    assert seen == [MEAN + i for i in (1, 2, 3)]


def fires_at(values, **options):
    """Return after which of the values, one list per rank, the trigger fires, for each rank."""
    trigger = MultiNodeEarlyStoppingTrigger(COMM, check_trigger=(1, "epoch"), verbose=False, **options)
    trainer = Stub(1)
    fired = []
    for value in values:
        trainer.step(loss=value, accuracy=value)
        fired.append(trigger(trainer))
    return fired


@pytest.mark.parametrize(
    ("monitor", "values", "expected"),
    [
        ("main/accuracy", [0.5, 0.5, 0.6, 0.7, 0.6, 0.4, 0.3, 0.2], [False] * 6 + [True] * 2),
        ("main/loss", [100, 80, 30, 10, 20, 24, 30, 35], [False] * 6 + [True] * 2),
    ],
)
def test_early_stopping_by_the_mean(monitor, values, expected):
    # Rank 0 alone would see the opposite of the mean.
    mine = [-value if RANK == 0 else value for value in values] if SIZE > 2 else values
    assert fires_at(mine, monitor=monitor, patience=3) == expected


def test_early_stopping_at_the_longest_and_under_another_name():
    trigger = MultiNodeEarlyStoppingTrigger(COMM, max_trigger=(3, "epoch"), suffix="_of_all", patients=2)
    assert trigger.get_training_length() == (3, "epoch")
    trainer = Stub(1)
    fired = []
    for value in (3.0, 2.0, 1.0):
        trainer.step(loss=value + RANK)
        fired.append(trigger(trainer))
        np.testing.assert_allclose(trainer.observation["main/loss_of_all"], value + MEAN)
    assert fired == [False, False, True]


class WithStatistics(chainer.Chain):
    def __init__(self):
        super().__init__(l=L.Linear(2, 3), bn=L.BatchNormalization(3))
        self.bn.avg_mean[...], self.bn.avg_var[...], self.bn.N = RANK, RANK + 1, 7
        self.l.b.array[...] = RANK


@pytest.mark.parametrize("arguments", [(), (None,), (object(),)])
def test_persistent_values_without_a_trainer(arguments):
    model = WithStatistics()
    extension = AllreducePersistent(model, COMM)
    assert extension.trigger == (1, "epoch")
    assert extension(*arguments) is None
    np.testing.assert_allclose(model.bn.avg_mean, np.full(3, MEAN))
    np.testing.assert_allclose(model.bn.avg_var, np.full(3, MEAN + 1))
    assert model.bn.N == 7
    np.testing.assert_array_equal(model.l.b.array, np.full(3, RANK))


class Own(GenericMultiNodeEvaluator):
    """Of samples (a, b, c): all sums, in order."""

    def calc_local(self, *args, **kwargs):
        self.target = self._targets["main"]
        args = args or tuple(kwargs[name] for name in sorted(kwargs))
        return [float(x) for x in np.ravel(sum(args))]

    def aggregate(self, results):
        return sorted(x for result in results for x in result)


def generic(dataset, batch, kind=Own, **options):
    iterator = chainer.iterators.SerialIterator(dataset, batch, repeat=False, shuffle=False)
    return kind(COMM, iterator, options.pop("target", None), **options)


@pytest.mark.parametrize("length", [SIZE, 7, 30])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("samples", ["tuples", "dicts", "arrays"])
def test_results_of_calc_local_come_to_aggregate(samples, batch, length):
    mine = np.arange(RANK, length, SIZE).astype("f4")  # some ranks have more than others
    dataset = {
        "tuples": lambda: chainer.datasets.TupleDataset(mine, 2 * mine, mine),
        "dicts": lambda: chainer.datasets.DictDataset(a=mine, b=3 * mine),
        "arrays": lambda: 4 * mine,
    }[samples]()
    progress = []
    for root in range(SIZE):
        evaluator = generic(dataset, batch, root=root, progress_hook=progress.append)
        for _ in range(2):
            result = evaluator(None)
            assert result == ([4.0 * i for i in range(length)] if RANK == root else None)
    assert len(progress) == 2 * -(-len(mine) // batch)


def test_without_methods_of_its_own_the_target_is_called():
    evaluator = generic([RANK, RANK + 1], 2, GenericMultiNodeEvaluator, target=lambda x: x.tolist(), device=-1)
    assert evaluator(None) == ([[rank, rank + 1] for rank in range(SIZE)] if RANK == 0 else None)
    assert evaluator.trigger == (1, "epoch")
    assert evaluator.default_name == "validation"


def test_a_converter_and_no_graph():
    class Watching(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            assert not chainer.config.enable_backprop
            return x

    def converter(batch, device):
        return f"{'-'.join(batch)} {device}"

    for device in (None, -1):
        evaluator = generic(["a", "b", "c"], 2, Watching, converter=converter, device=device)
        expected = [f"a-b {device}"] * SIZE + [f"c {device}"] * SIZE
        assert evaluator(None) == (expected if RANK == 0 else None)

    @chainer.dataset.converter()
    def newer(batch, device):
        return device.name

    evaluator = generic(["a"], 1, Watching, converter=newer, device="@numpy")
    assert evaluator(None) == (["@numpy"] * SIZE if RANK == 0 else None)


def test_an_iterator_that_cannot_be_reset():
    class Once:
        def __init__(self):
            self.left = [[1.0], [2.0]]

        def __copy__(self):
            twin = Once()
            twin.left = self.left[:]
            return twin

        def next(self):
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

    evaluator = GenericMultiNodeEvaluator(COMM, Once(), lambda x: float(x[0]))
    for _ in range(2):
        assert evaluator(None) == ([1.0] * SIZE + [2.0] * SIZE if RANK == 0 else None)


class Parrot(chainer.Link):
    """Reports what it is given."""

    def forward(self, x):
        chainer.report({"loss": F.mean(x), "constant": 3}, self)


def test_evaluators_in_a_reporter_and_on_their_own():
    values = np.arange(6, dtype="f4") + 10 * RANK
    evaluator = extensions.Evaluator(
        chainer.iterators.SerialIterator(values, 2, repeat=False, shuffle=False), Parrot(), device=-1
    )
    evaluator = chainermn.create_multi_node_evaluator(evaluator, COMM)
    assert isinstance(evaluator, extensions.Evaluator)
    evaluator.name = "test"
    for _ in range(2):
        found = evaluator()
        assert set(found) == {"test/main/loss", "test/main/constant"}
        np.testing.assert_allclose(found["test/main/loss"], 2.5 + 10 * MEAN)
        assert found["test/main/constant"] == 3


@pytest.mark.parametrize("sets", [[], [0], [range(0, SIZE, 2)], [[0], range(1, SIZE)] if SIZE > 1 else [[0]]])
def test_one_snapshot_for_each_set(sets):
    condition, writer = mock.MagicMock(side_effect=[True, False]), mock.MagicMock()
    snapshot = extensions.snapshot(target=mock.MagicMock(), condition=condition, writer=writer)
    extension = multi_node_snapshot(COMM, snapshot, sets)
    trainer = mock.MagicMock()
    extension.initialize(trainer)
    extension(trainer)
    extension(trainer)
    extension.finalize()
    masters = {0} if not sets or SIZE == 1 else {0, 1}
    assert extension.is_master is (RANK in masters)
    assert condition.call_count == (2 if extension.is_master else 0)
    assert writer.call_count == (1 if extension.is_master else 0)
    assert writer.finalize.call_count == (1 if extension.is_master else 0)


@pytest.mark.parametrize("filename", ["snapshot", lambda trainer: f"at-{trainer.updater.iteration}"])
def test_a_snapshot_that_is_a_mock(filename):
    snapshot = mock.MagicMock(autoload=False, filename=filename)
    trainer = mock.MagicMock()
    trainer.updater.iteration = 9
    extension = multi_node_snapshot(COMM, snapshot, [0])
    found = snapshot.filename(trainer) if callable(filename) else snapshot.filename
    assert found == f"{'at-9' if callable(filename) else filename}.{RANK}"
    extension.initialize(trainer)
    extension(trainer)
    error = ValueError()
    extension.on_error(trainer, error, None)
    extension.finalize()
    calls = [mock.call.initialize(trainer), mock.call(trainer), mock.call.on_error(trainer, error, None)]
    assert snapshot.mock_calls == ([*calls, mock.call.finalize()] if RANK in (0, 1) else [])


@pytest.mark.parametrize("sets", [[], [0], list(range(SIZE))])
@pytest.mark.parametrize("target", ["trainer", "model"])
def test_snapshots_are_loaded_by_all_ranks(folder, sets, target):
    def run(stop, fill):
        model = L.Linear(2, 3, initialW=fill)
        updater = chainer.training.StandardUpdater(
            chainer.iterators.SerialIterator(np.ones((4, 2), "f4"), 2),
            chainer.optimizers.SGD(lr=0).setup(chainer.Sequential(model, F.sum)),
        )
        trainer = chainer.training.Trainer(updater, (stop, "iteration"), out=str(folder))
        snapshot = extensions.snapshot(
            target=model if target == "model" else None,
            filename="saved_{.updater.iteration}" if target == "trainer" else "saved",
            autoload=True,
        )
        trainer.extend(multi_node_snapshot(COMM, snapshot, sets), trigger=(2, "iteration"))
        trainer.run()
        return model, updater.iteration

    run(2, RANK)
    COMM.mpi_comm.Barrier()
    count = len(list(folder.iterdir()))
    COMM.mpi_comm.Barrier()
    assert count == {0: 1, 1: min(2, SIZE)}.get(len(sets), SIZE)
    model, iteration = run(3, -1)
    assert iteration == 3
    master = 0 if not sets or RANK == 0 else (1 if len(sets) == 1 else RANK)
    np.testing.assert_array_equal(model.W.array, np.full((3, 2), master))


def boom(trainer):
    raise ArithmeticError("boom")


@pytest.mark.parametrize("sets", [[], [0]])
def test_snapshots_that_are_saved_on_errors_and_of_which_few_are_kept(folder, sets):
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(np.ones((4, 2), "f4"), 2),
        chainer.optimizers.SGD().setup(chainer.Sequential(L.Linear(2, 3), F.sum)),
    )
    trainer = chainer.training.Trainer(updater, (9, "iteration"), out=str(folder))
    snapshot = extensions.snapshot(filename="s_{.updater.iteration}", snapshot_on_error=True, n_retains=2)
    trainer.extend(multi_node_snapshot(COMM, snapshot, sets), trigger=(1, "iteration"))
    trainer.extend(boom, trigger=(4, "iteration"), priority=1000)
    with pytest.raises(ArithmeticError, match="boom"):
        trainer.run(show_loop_exception_msg=False)
    COMM.mpi_comm.Barrier()
    masters = {0, *([1] if sets else [])} & set(range(SIZE))
    assert {path.name for path in folder.iterdir()} == {f"s_{i}.{m}" for i in (3, 4) for m in masters}


def checkpointed(folder, stop, **options):
    np.random.seed(RANK)
    model = L.Classifier(L.Linear(3, 2))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), COMM).setup(model)
    x = np.random.RandomState(0).rand(12 * SIZE, 3).astype("f4")
    data = chainer.datasets.TupleDataset(x, (x[:, 0] > 0.5).astype("i4"))
    part = chainermn.scatter_dataset(data if RANK == 0 else None, COMM)
    updater = chainer.training.StandardUpdater(chainer.iterators.SerialIterator(part, 4, shuffle=False), optimizer)
    trainer = chainer.training.Trainer(updater, stop, out=str(folder / "out"))
    checkpointer = chainermn.create_multi_node_checkpointer(name="job", comm=COMM, **options)
    trainer.extend(checkpointer, trigger=(1, "iteration"))
    return trainer, optimizer, checkpointer


def names(folder):
    COMM.mpi_comm.Barrier()
    found = sorted(path.name for path in folder.glob(f"job.{RANK}.*"))
    COMM.mpi_comm.Barrier()
    return found


@pytest.mark.parametrize("place", ["path", "out"])
def test_checkpoints_of_an_interrupted_training(folder, place):
    options = {"path": str(folder / "cp")} if place == "path" else {}
    where = folder / ("cp" if place == "path" else "out")
    trainer, optimizer, checkpointer = checkpointed(folder, (4, "iteration"), **options)
    checkpointer.maybe_load(trainer, optimizer)
    assert trainer.updater.iteration == 0
    with mock.patch.object(checkpointer, "finalize"):  # as if it had been killed
        trainer.run()
    assert f"job.{RANK}.4" in names(where)
    resumed, optimizer, checkpointer = checkpointed(folder, (6, "iteration"), **options)
    checkpointer.maybe_load(resumed, optimizer)
    assert (resumed.updater.iteration, resumed.updater.epoch) == (4, 1)
    for old, new in zip(trainer.updater.get_optimizer("main").target.params(), optimizer.target.params(), strict=True):
        np.testing.assert_array_equal(old.array, new.array)
    assert isinstance(checkpointer.get_stats(), str)
    resumed.run()
    assert isinstance(checkpointer.get_stats(), str)
    assert resumed.updater.iteration == 6
    assert names(where) == []  # a training that ended normally leaves none


@pytest.mark.parametrize("count", [1, 3, 9])
def test_checkpoints_without_a_trainer(folder, count):
    model, other = L.Linear(2, 3, initialW=RANK), L.Linear(2, 3)
    checkpointer = chainermn.create_multi_node_checkpointer("job", COMM, 3, 5, str(folder))
    for iteration in range(count):
        checkpointer.save(model, iteration)
    assert set(names(folder)) >= {f"job.{RANK}.{i}" for i in range(max(0, count - 3), count)}
    again = chainermn.create_multi_node_checkpointer("job", COMM, path=str(folder))
    again.maybe_load(other)
    np.testing.assert_array_equal(other.W.array, model.W.array)
    again.finalize()
    assert not {f"job.{RANK}.{i}" for i in range(max(0, count - 3), count)} & set(names(folder))


@pytest.mark.filterwarnings("ignore:.*cannot be read.* trying the previous checkpoint")
def test_the_newest_checkpoint_that_every_rank_has(folder):
    model = L.Linear(2, 3)
    checkpointer = chainermn.create_multi_node_checkpointer("job", COMM, path=str(folder))
    for iteration in (1, 2, 3):
        model.W.array[...] = iteration
        checkpointer.save(model, iteration)
    assert len(names(folder)) == 3
    if RANK == SIZE - 1:
        (folder / f"job.{RANK}.3").unlink()
    COMM.mpi_comm.Barrier()
    again = chainermn.create_multi_node_checkpointer("job", COMM, path=str(folder))
    again.maybe_load(model)
    np.testing.assert_array_equal(model.W.array, np.full((3, 2), 2))
