import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.training import extensions, get_trigger

import mn_extensions  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_extensions import (
    AllreducePersistent,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
    create_memory_keeper,
    main_rank_only,
    multi_node_snapshot,
)
from mn_extensions.checkpoint import arrays as checkpoint_arrays

pytestmark = pytest.mark.sizes(1, 4)

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size


@pytest.fixture
def folder():
    """One empty folder for all ranks."""
    path = COMM.bcast_obj(tempfile.mkdtemp() if RANK == 0 else None)
    yield Path(path)
    COMM.mpi_comm.Barrier()
    if RANK == 0:
        shutil.rmtree(path)


@pytest.fixture(autouse=True)
def nothing_is_left_over():
    yield
    assert COMM.allreduce(np.ones(1)) == SIZE


class Model(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l = L.Linear(2, 3)

    def forward(self, x):
        loss = chainer.functions.sum(self.l(x) ** 2)
        chainer.report({"loss": loss}, self)
        return loss


def training(folder, iterations, data=None, optimizer=None):
    optimizer = optimizer or chainer.optimizers.SGD(1e-3)
    optimizer.setup(Model())
    data = np.random.RandomState(RANK).rand(6, 2).astype("f4") if data is None else data
    updater = chainer.training.StandardUpdater(chainer.iterators.SerialIterator(data, 2), optimizer)
    stop = iterations if callable(iterations) else (iterations, "iteration")
    return chainer.training.Trainer(updater, stop, out=str(folder))


def observe(trainer, key, values):
    def extension(trainer):
        trainer.observation[key] = values[trainer.updater.iteration - 1]

    trainer.extend(extension, name="observe", trigger=(1, "iteration"), priority=300)


@pytest.mark.parametrize("kind", [float, np.float32, lambda x: chainer.Variable(np.float32([x])[0:1])])
def test_observations_become_the_mean_over_ranks(folder, kind):
    trainer = training(folder, 3)
    observe(trainer, "x", [kind(RANK + i) for i in range(3)])
    seen = []
    trainer.extend(ObservationAggregator(COMM, "x"))
    trainer.extend(lambda t: seen.append(float(np.ravel(t.observation["x"])[0])), name="look", trigger=(1, "iteration"))
    trainer.run()
    np.testing.assert_allclose(seen, [(SIZE - 1) / 2 + i for i in range(3)])


def test_observations_since_the_last_time_are_put_together(folder):
    trainer = training(folder, 4)
    observe(trainer, "x", [10 * RANK + i for i in range(4)])
    seen = []
    aggregator = ObservationAggregator(COMM, "x", "all", comm_trigger=(2, "iteration"), aggregator=lambda xs: xs)
    trainer.extend(aggregator)
    trainer.extend(lambda t: seen.append(t.observation.get("all")), name="look", trigger=(1, "iteration"))
    trainer.run()
    expected = [[[10 * rank + i, 10 * rank + i + 1] for rank in range(SIZE)] for i in (0, 2)]
    assert seen == [None, expected[0], None, expected[1]]


def test_an_observation_that_some_ranks_or_none_have(folder):
    for ranks, expected in (([0], 5.0), ([], None)):
        trainer = training(folder, 1)
        observe(trainer, "x" if RANK in ranks else "y", [5.0])
        trainer.extend(ObservationAggregator(COMM, "x", "mean"))
        trainer.run()
        assert trainer.observation.get("mean") == expected


def test_an_error_of_the_aggregator_raises_on_all_ranks(folder):
    trainer = training(folder, 1)
    observe(trainer, "x", [1])
    trainer.extend(ObservationAggregator(COMM, "x", aggregator=lambda xs: 1 / 0))
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        trainer.run(show_loop_exception_msg=False)


@pytest.mark.parametrize("kind", [tuple, get_trigger])
@pytest.mark.filterwarnings("ignore:x_aggregated is not in observation")
def test_early_stopping_stops_all_ranks_at_once(folder, kind):
    # Each rank alone would continue: some rank always improves.
    values = [100.0 * SIZE - i * (SIZE if RANK == 0 else 0) + i * (SIZE if RANK == SIZE - 1 else 0) for i in range(99)]
    trigger = MultiNodeEarlyStoppingTrigger(
        COMM, check_trigger=kind((1, "iteration")), monitor="x", patience=3, max_trigger=(30, "iteration")
    )
    trainer = training(folder, trigger)
    observe(trainer, "x", values)
    trainer.run()
    stopped = COMM.allgather_obj(trainer.updater.iteration)
    assert len(set(stopped)) == 1
    assert stopped[0] == 4  # the first is the best, and three are not better
    assert trigger.get_training_length() == (30, "iteration")


class Persistent(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.bn = L.BatchNormalization(3)
        self.bn.avg_mean[...] = RANK
        self.bn.N = 5 + RANK
        self.add_persistent("half", np.full(4, RANK, "f2"))
        self.add_persistent("transposed", np.full((2, 3), RANK, "f8").T)
        self.add_persistent("strided", np.full(10, RANK, "f4")[::2])
        self.add_persistent("number", float(RANK))
        self.add_persistent("numpy_number", np.float32(RANK))
        self.add_persistent("integers", np.full(3, RANK))
        self.add_persistent("scalar", np.array(RANK, "f4"))
        self.add_persistent("text", f"rank {RANK}")


def test_floating_persistents_are_averaged_and_others_left():
    model = Persistent()
    arrays = [model.bn.avg_mean, model.half, model.transposed, model.strided, model.scalar]
    AllreducePersistent(model, COMM)()
    for array in arrays:
        np.testing.assert_allclose(array, (SIZE - 1) / 2)
    assert model.transposed is arrays[2]
    assert model.number == (SIZE - 1) / 2
    assert model.numpy_number == (SIZE - 1) / 2
    assert type(model.numpy_number) is np.float32
    assert (model.integers == RANK).all()
    assert model.bn.N == 5 + RANK
    assert model.text == f"rank {RANK}"


def test_large_persistents_in_half_precision():
    model = L.BatchNormalization(3, dtype=np.float16)
    model.avg_var[...] = 60_000
    AllreducePersistent(model, COMM)()
    np.testing.assert_array_equal(model.avg_var, np.full(3, 60_000, np.float16))


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
def test_persistents_that_differ():
    model = Persistent()
    if RANK:
        model.add_persistent("more", np.ones(1, "f4"))
    with pytest.raises(ValueError, match="expected the same persistent values on every rank"):
        AllreducePersistent(model, COMM)()


def test_only_one_rank_runs_an_extension(folder):
    called = []

    def own(trainer):
        called.append(trainer.updater.iteration)

    trainer = training(folder, 2)
    trainer.extend(main_rank_only(extensions.LogReport(trigger=(1, "iteration"), log_name=f"log{RANK}"), COMM))
    trainer.extend(main_rank_only(own, COMM, rank=SIZE - 1), trigger=(1, "iteration"))
    trainer.run()
    assert called == ([1, 2] if RANK == SIZE - 1 else [])
    assert (folder / f"log{RANK}").exists() is (RANK == 0)
    assert [trainer.get_extension(name) is not None for name in ("LogReport", "own")] == [True, True]
    with pytest.raises(ValueError, match="expected rank in"):
        main_rank_only(own, COMM, rank=SIZE)
    assert (main_rank_only(own) is own) is (RANK == 0)


def snapshot(**kwds):
    return extensions.snapshot(filename="snap_{.updater.iteration}", **kwds)


@pytest.mark.parametrize("function", [False, True])
def test_one_file_for_each_set(folder, function):
    each = snapshot()
    if function:
        each.filename = lambda trainer: f"snap_{trainer.updater.iteration}"
    trainer = training(folder, 2)
    trainer.extend(multi_node_snapshot(COMM, each, [0]), trigger=(1, "iteration"))
    trainer.run()
    COMM.mpi_comm.Barrier()
    masters = [0, 1][:SIZE]
    assert {p.name for p in folder.iterdir()} == {f"snap_{i}.{m}" for i in (1, 2) for m in masters}


def save_two(folder, comm=COMM, iterations=2):
    trainer = training(folder, iterations)
    if comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(multi_node_snapshot(comm, snapshot(), [0]), trigger=(1, "iteration"))
    trainer.run()
    return trainer


def loaded(folder, data=None, optimizer=None):
    trainer = training(folder, 0, data, optimizer)
    if RANK == 0:
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(multi_node_snapshot(COMM, snapshot(autoload=True), [0]), trigger=(1, "iteration"))
    stop = []
    trainer.stop_trigger = lambda t: stop or True
    trainer.run()
    return trainer


def weights(trainer):
    return trainer.updater.get_optimizer("main").target.l.W.data


def test_all_ranks_start_from_the_newest_that_every_set_has(folder):
    saved = save_two(folder)
    COMM.mpi_comm.Barrier()
    if RANK == 0:  # rank 0 died later than the others
        (folder / "snap_9.0").write_bytes((folder / "snap_2.0").read_bytes())
    COMM.mpi_comm.Barrier()
    if SIZE == 1:
        (folder / "snap_9.0").unlink()
    trainer = loaded(folder)
    assert trainer.updater.iteration == 2
    np.testing.assert_array_equal(weights(trainer), COMM.allgather(weights(saved))[min(RANK, 1)])
    if RANK == 0:
        assert len(trainer.get_extension("LogReport").log) == 2


@pytest.mark.parametrize("how", ["cut", "pipe"])
def test_a_harmed_snapshot_is_passed_over(folder, how):
    save_two(folder)
    COMM.mpi_comm.Barrier()
    if RANK == 0:
        content = (folder / "snap_2.0").read_bytes()
        if how == "cut":
            (folder / "snap_2.0").write_bytes(content[: len(content) // 2])
        else:
            (folder / "snap_2.0").unlink()
            os.mkfifo(folder / "snap_2.0")
        now = time.time()
        os.utime(folder / "snap_2.0", (now + 5, now + 5))
    COMM.mpi_comm.Barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert loaded(folder).updater.iteration == 1
    messages = [str(each.message) for each in caught]
    assert [("snap_2.0" in message) for message in messages] == [True] * (RANK == 0)


@pytest.mark.parametrize("group", [0, min(1, SIZE - 1)])
def test_a_lack_of_memory_raises_on_all_ranks(folder, group, monkeypatch):
    save_two(folder)

    def read_no_array(*_, **__):
        raise MemoryError("no more")

    if RANK == group:
        monkeypatch.setattr(checkpoint_arrays.npy, "read_array", read_no_array)
    COMM.mpi_comm.Barrier()
    with pytest.raises(MemoryError, match="no more"):
        loaded(folder)


def test_a_link_to_nothing_is_not_a_snapshot(folder):
    save_two(folder)
    if RANK == 0:
        (folder / "snap_9.0").symlink_to(folder / "gone")
    COMM.mpi_comm.Barrier()
    assert loaded(folder).updater.iteration == 2


@pytest.mark.skipif(SIZE < 2, reason="needs two groups")
@pytest.mark.parametrize("group", [0, 1])
def test_files_of_one_group_alone_are_not_passed_over_in_silence(folder, group):
    save_two(folder)
    COMM.mpi_comm.Barrier()
    if RANK == 0:
        for i in (1, 2):
            (folder / f"snap_{i}.{group}").unlink()
    COMM.mpi_comm.Barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert loaded(folder).updater.iteration == 0
    assert ["expected a snapshot of which each group has its file" in str(each.message) for each in caught] == [
        True
    ] * (RANK == 0)


def test_nothing_to_load(folder):
    assert loaded(folder).updater.iteration == 0


@pytest.mark.skipif(SIZE < 2, reason="needs two sizes")
@pytest.mark.parametrize("grows", [True, False])
def test_another_number_of_ranks(folder, grows):
    # With the current number of ranks or fewer, and then the other way round; parts have different lengths.
    if grows:
        half = COMM.split(min(RANK, 1) if SIZE == 2 else RANK // 2, RANK)
        if RANK < half.size:
            save_two(folder, half, iterations=4)
        half.finalize()
        masters = 1 if SIZE == 2 else 2
        COMM.mpi_comm.Barrier()
        if RANK == 0 and masters == 1:
            for i in (1, 2, 3, 4):
                shutil.copy(folder / f"snap_{i}.0", folder / f"snap_{i}.1")
        COMM.mpi_comm.Barrier()
    else:
        save_two(folder, iterations=4)
    if RANK == 0:
        now = time.time()
        for i in (1, 2, 3, 4):
            os.utime(folder / f"snap_{i}.0", (now + i, now + i))
    COMM.mpi_comm.Barrier()
    trainer = loaded(folder, data=np.ones((12, 2), "f4"))
    assert trainer.updater.iteration == 4
    iterator = trainer.updater.get_iterator("main")
    assert (iterator.epoch, iterator.current_position) == (1, 4)  # a third of the epoch, as before
    iterator.next()


def test_no_update_is_lost_after_loading(folder):
    class Optimizer(chainer.optimizers.SGD):
        communicator = COMM
        is_synchronized = False

        def assume_synchronized(self):
            self.is_synchronized = True

    save_two(folder)
    optimizer = Optimizer()
    trainer = loaded(folder, optimizer=optimizer)
    same = all((other == weights(trainer)).all() for other in COMM.allgather(weights(trainer)))
    assert optimizer.is_synchronized is same


@pytest.mark.parametrize(
    ("sets", "error", "message"),
    [
        ([0, [0]], ValueError, "expected replica_sets that do not overlap, got rank 0 twice"),
        ([SIZE], ValueError, rf"expected ranks in 0\.\.{SIZE - 1}"),
        ([-1], ValueError, "expected ranks in"),
        ([None], TypeError, "NoneType"),
    ],
)
def test_bad_replica_sets(sets, error, message):
    with pytest.raises(error, match=message):
        multi_node_snapshot(COMM, snapshot(), sets if RANK == SIZE - 1 else [])


def test_autoload_needs_a_name_that_can_be_looked_for():
    each = snapshot(autoload=True)
    each.filename = lambda trainer: "x"
    with pytest.raises(ValueError, match="expected a string as the file name"):
        multi_node_snapshot(COMM, each, [])


class Keeper:
    """A connection to the keeper of a node."""

    def ask(self, message, *files):
        return {}, None


class Holder:
    """An object whose state cannot be kept."""

    def serialize(self, serializer):
        serializer("held", np.asarray({}))


def test_all_ranks_raise_if_a_state_cannot_be_kept(monkeypatch):
    monkeypatch.setattr("mn_elastic.memory.link.connection", Keeper)
    keeper = create_memory_keeper(COMM)
    with pytest.raises(TypeError, match="without Python objects, got dtype object in held"):
        keeper.keep(Holder(), 1)
