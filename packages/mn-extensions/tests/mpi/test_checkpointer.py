import os
import re
import shutil
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import mn_extensions  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_extensions import create_multi_node_checkpointer
from mn_extensions.checkpoint.arrays import write_arrays
from mn_extensions.checkpoint.files import write_file

pytestmark = pytest.mark.sizes(1, 3)

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


class Optimizer(chainer.optimizers.Adam):
    """A multi-node optimizer with the interface that the checkpointer uses."""

    communicator = COMM
    is_synchronized = False

    def assume_synchronized(self):
        self.is_synchronized = True


class MLP(chainer.Chain):
    def __init__(self, n_units=4):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, n_units)
            self.l2 = L.Linear(n_units, 2)

    def forward(self, x, t):
        return F.softmax_cross_entropy(self.l2(F.dropout(F.tanh(self.l1(x)))), t)


def training(folder, iterations=6, model=None, **kwds):
    """Return a trainer that draws random numbers and saves in every iteration."""
    random = np.random.RandomState(RANK)
    dataset = chainer.datasets.TupleDataset(random.rand(10, 3).astype("f4"), random.randint(0, 2, 10).astype("i4"))
    optimizer = Optimizer().setup(model or MLP())
    updater = chainer.training.StandardUpdater(chainer.iterators.SerialIterator(dataset, 4), optimizer)
    trainer = chainer.training.Trainer(updater, (iterations, "iteration"), out=str(folder))
    checkpointer = create_multi_node_checkpointer(kwds.pop("run", "run"), COMM, **kwds)
    trainer.extend(checkpointer, trigger=(1, "iteration"))
    trainer.extend(chainer.training.extensions.LogReport(trigger=(1, "iteration")))
    return trainer, checkpointer, optimizer


class Died(Exception):
    pass


def run_and_die(trainer, after):
    def die(trainer):
        if trainer.updater.iteration == after:
            raise Died

    trainer.extend(die, name="die", priority=-200)
    with pytest.raises(Died):
        trainer.run(show_loop_exception_msg=False)


def names(folder, run="run"):
    COMM.mpi_comm.Barrier()
    found = {path.name for path in folder.iterdir()} - {"log"}
    COMM.mpi_comm.Barrier()
    return found


def generation(run, *iterations):
    return {f"{run}.{owner}.{i}" for i in iterations for owner in [*range(SIZE), "manifest"]}


def parameters(optimizer):
    return {name: param.data.copy() for name, param in optimizer.target.namedparams()}


@pytest.mark.parametrize("run", ["run", "with.dots.1", "a b"])
def test_a_training_that_died_goes_on_as_if_it_had_not(folder, run):
    np.random.seed(RANK)
    uninterrupted, _, expected = training(folder / "uninterrupted", run=run)
    uninterrupted.run()
    np.random.seed(RANK)
    first, _, _ = training(folder, run=run)
    run_and_die(first, 4)
    assert names(folder) - {"uninterrupted"} == generation(run, 1, 2, 3, 4)

    np.random.seed(99)
    trainer, checkpointer, optimizer = training(folder, run=run)
    assert checkpointer.maybe_load(trainer, optimizer) == 4
    assert trainer.updater.iteration == 4
    trainer.run()
    for name, data in parameters(expected).items():
        np.testing.assert_array_equal(parameters(optimizer)[name], data)
    assert names(folder) - {"uninterrupted"} == set()


def test_nothing_to_resume(folder):
    trainer, checkpointer, optimizer = training(folder)
    assert checkpointer.maybe_load(trainer, optimizer) is None
    assert trainer.updater.iteration == 0
    assert not optimizer.is_synchronized
    checkpointer.finalize()


@pytest.mark.parametrize("passed", [True, False])
def test_no_update_is_lost_if_all_ranks_have_the_same_parameters(folder, passed):
    model = MLP()
    model(np.ones((1, 3), "f4"), np.zeros(1, "i4"))
    for rank in range(2):  # first they differ, then not
        for param in model.params():
            param.data[...] = RANK * (1 - rank)
        _, saver, optimizer = training(folder, model=model, path=folder)
        saver.save(model, rank)
        _, checkpointer, optimizer = training(folder, model=model, path=folder)
        if passed:
            checkpointer.maybe_load(model, optimizer)
            assert optimizer.is_synchronized is (rank == 1 or SIZE == 1)
        else:
            checkpointer.maybe_load(model)
            assert not optimizer.is_synchronized


def test_the_trainers_own_optimizers_are_told(folder):
    for param in MLP().params():
        param.cleargrad()
    model = chainer.Chain()  # no parameters that could differ
    trainer, checkpointer, _ = training(folder, model=model)
    trainer.updater.update = lambda: setattr(trainer.updater, "iteration", trainer.updater.iteration + 1)
    run_and_die(trainer, 2)
    trainer, checkpointer, optimizer = training(folder, model=chainer.Chain())
    assert checkpointer.maybe_load(trainer) == 2
    assert optimizer.is_synchronized


def test_renaming_the_extension_does_not_rename_the_files(folder):
    trainer, checkpointer, _ = training(folder)
    trainer = chainer.training.Trainer(trainer.updater, (3, "iteration"), out=str(folder))
    trainer.extend(checkpointer, name="another.name", trigger=(1, "iteration"))
    run_and_die(trainer, 2)
    assert names(folder) == generation("run", 1, 2)


@pytest.mark.parametrize("how", ["exception", "interrupt", "success", "one rank"])
def test_files_are_removed_after_success_only(folder, how):
    trainer, checkpointer, _ = training(folder, iterations=3)
    if how == "exception":
        run_and_die(trainer, 3)
    elif how == "interrupt":

        def interrupt(trainer):
            if trainer.updater.iteration == 3:
                raise KeyboardInterrupt

        trainer.extend(interrupt, name="interrupt", priority=-200)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(show_loop_exception_msg=False)
    elif how == "one rank" and RANK == SIZE - 1:
        run_and_die(trainer, 3)
    else:
        trainer.run()
    assert names(folder) == (set() if how == "success" else generation("run", 1, 2, 3))
    checkpointer.finalize()  # once more, as some scripts do
    assert names(folder) == (set() if how == "success" else generation("run", 1, 2, 3))


@pytest.mark.parametrize(
    ("keep", "every", "kept"), [(2, 3, [7, 8, 9]), (1, 1, [9]), (3, 4, [5, 6, 7, 8, 9]), (5, 20, [*range(10)])]
)
def test_old_generations_are_collected(folder, keep, every, kept):
    model = L.Linear(2, 3)
    checkpointer = create_multi_node_checkpointer("run", COMM, keep, every, folder)
    for iteration in range(10):
        checkpointer.save(model, iteration)
    assert names(folder) == generation("run", *kept)
    checkpointer.finalize()
    assert names(folder) == set()


def test_files_of_other_runs_are_left_alone(folder):
    model = L.Linear(2, 3)
    for run in ("run", "run.0", "other"):
        create_multi_node_checkpointer(run, COMM, path=folder).save(model, 7)
    (folder / "run.0.x").touch()
    checkpointer = create_multi_node_checkpointer("run", COMM, 1, 1, path=folder)
    checkpointer.maybe_load(model)
    checkpointer.save(model, 8)
    checkpointer.finalize()
    assert names(folder) == generation("run.0", 7) | generation("other", 7) | {"run.0.x"}


def damage(path, how):
    if how == "delete":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if how == "cut":
        del content[len(content) // 2 :]
    elif how == "zero":
        content = bytearray(len(content))
    elif how == "empty":
        content = b""
    else:
        content[len(content) // 3] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("owner", [0, SIZE - 1, "manifest"])
@pytest.mark.parametrize("how", ["cut", "zero", "empty", "flip", "delete"])
def test_a_harmed_generation_is_passed_over(folder, how, owner):
    model = L.Linear(2, 3)
    saver = create_multi_node_checkpointer("run", COMM, path=folder)
    for iteration in (1, 2):
        model.W.data[...] = iteration
        saver.save(model, iteration)
    COMM.mpi_comm.Barrier()
    if RANK == 0:
        damage(folder / f"run.{owner}.2", how)
    COMM.mpi_comm.Barrier()
    checkpointer = create_multi_node_checkpointer("run", COMM, path=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checkpointer.maybe_load(model) == 1
    assert (model.W.data == 1).all()
    messages = [str(each.message) for each in caught]
    if RANK == 0 and not (how == "delete" and owner == "manifest"):  # this is an incomplete generation like any other
        assert len(messages) == 1
        assert str(folder / f"run.{owner}.2") in messages[0]
        assert caught[0].filename == __file__
    else:
        assert messages == []
    # The damaged one is written again, and the two intact ones are the newest.
    model.W.data[...] = 5
    checkpointer.save(model, 2)
    last = create_multi_node_checkpointer("run", COMM, path=folder)
    model.W.data[...] = 0
    assert last.maybe_load(model) == 2
    assert (model.W.data == 5).all()


@pytest.mark.parametrize("owner", [0, SIZE - 1, "manifest"])
@pytest.mark.parametrize("what", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_pipe_or_device_in_place_of_a_file_is_not_read(folder, what, owner):
    model = L.Linear(2, 3)
    saver = create_multi_node_checkpointer("run", COMM, path=folder)
    for iteration in (1, 2):
        saver.save(model, iteration)
    COMM.mpi_comm.Barrier()
    if RANK == 0:
        (folder / f"run.{owner}.2").unlink()
        what(folder / f"run.{owner}.2")
    COMM.mpi_comm.Barrier()
    checkpointer = create_multi_node_checkpointer("run", COMM, path=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checkpointer.maybe_load(model) == 1
    assert ["not a regular file" in str(each.message) for each in caught] == [True] * (RANK == 0)
    if owner != "manifest":
        with pytest.raises(FileExistsError, match=rf"run\.{owner}\.2"):
            checkpointer.save(model, 2)


def test_a_folder_that_is_gone_raises_on_all_ranks(folder):
    checkpointer = create_multi_node_checkpointer("run", COMM, path=folder / "new")
    checkpointer.save(L.Linear(2, 3), 1)
    COMM.mpi_comm.Barrier()
    if RANK == 0:
        shutil.rmtree(folder / "new")
    COMM.mpi_comm.Barrier()
    with pytest.raises(FileNotFoundError, match="new"):
        checkpointer.maybe_load(L.Linear(2, 3))


def test_a_harmed_generation_is_collected_first(folder):
    model = L.Linear(2, 3)
    saver = create_multi_node_checkpointer("run", COMM, path=folder)
    for iteration in (1, 2, 9):
        saver.save(model, iteration)
    if RANK == 0:
        damage(folder / "run.0.9", "cut")
    checkpointer = create_multi_node_checkpointer("run", COMM, cp_interval=2, gc_interval=1, path=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpointer.maybe_load(model) == 2
    checkpointer.save(model, 3)
    assert names(folder) == generation("run", 2, 3)


def test_what_a_killed_process_left_is_removed(folder):
    model = L.Linear(2, 3)
    create_multi_node_checkpointer("run", COMM, path=folder).save(model, 1)
    (folder / f"tmp-run.{RANK}.2.abc").touch()
    write_file(folder, f"run.{RANK}.2", lambda file: write_arrays(file, {}))
    COMM.mpi_comm.Barrier()
    checkpointer = create_multi_node_checkpointer("run", COMM, gc_interval=1, path=folder)
    assert checkpointer.maybe_load(model) == 1
    checkpointer.save(model, 3)
    assert names(folder) == generation("run", 1, 3)


def save_as_ever(folder, model, value, iteration):
    """Save in the same way as the ChainerMN in Chainer."""
    model.W.data[...] = value
    chainer.serializers.save_npz(str(folder / f"run.{RANK}.{iteration}"), model)
    COMM.mpi_comm.Barrier()


def content(folder, iteration):
    return (folder / f"run.{RANK}.{iteration}").read_bytes()


def test_the_newest_of_both_kinds(folder):
    model = L.Linear(2, 3)
    for iteration in (1, 5):
        save_as_ever(folder, model, iteration, iteration)
    before = content(folder, 1), content(folder, 5)
    for expected, saved in ((5, 3), (5, 7), (7, 9)):
        checkpointer = create_multi_node_checkpointer("run", COMM, 1, 1, path=folder)
        assert checkpointer.maybe_load(model) == expected
        assert (model.W.data == expected).all()
        model.W.data[...] = saved
        checkpointer.save(model, saved)
    assert names(folder) == {f"run.{rank}.{i}" for rank in range(SIZE) for i in (1, 5)} | generation("run", 9)
    checkpointer.finalize()
    assert names(folder) == {f"run.{rank}.{i}" for rank in range(SIZE) for i in (1, 5)}
    assert (content(folder, 1), content(folder, 5)) == before


def test_a_file_that_another_program_put_in_place_of_ours(folder):
    model = L.Linear(2, 3)
    create_multi_node_checkpointer("run", COMM, path=folder).save(model, 2)
    save_as_ever(folder, model, 4, 2)
    before = content(folder, 2)
    checkpointer = create_multi_node_checkpointer("run", COMM, path=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpointer.maybe_load(model) == 2
    assert (model.W.data == 4).all()
    with pytest.raises(FileExistsError, match=r"expected no file of another program .*run\.\d\.2"):
        checkpointer.save(model, 2)
    checkpointer.finalize()
    assert content(folder, 2) == before


def test_a_file_in_the_way_on_one_rank(folder):
    if RANK == SIZE - 1:
        (folder / f"run.{RANK}.3").write_text("notes")
    COMM.mpi_comm.Barrier()
    checkpointer = create_multi_node_checkpointer("run", COMM, path=folder)
    model = L.Linear(2, 3)
    checkpointer.save(model, 2)
    with pytest.raises(FileExistsError if RANK == SIZE - 1 else OSError, match=rf"run\.{SIZE - 1}\.3"):
        checkpointer.save(model, 3)
    assert names(folder) == generation("run", 2) | {f"run.{SIZE - 1}.3"}
    checkpointer.save(model, 4)  # nothing waits
    checkpointer.finalize()
    assert names(folder) == {f"run.{SIZE - 1}.3"}


def test_a_folder_in_place_of_a_file(folder):
    """No rank waits, whatever fails on only one rank."""
    checkpointer = create_multi_node_checkpointer("run", COMM, 1, 1, path=folder)
    model = L.Linear(2, 3)
    checkpointer.save(model, 1)
    if RANK == SIZE - 1:
        (folder / f"run.{RANK}.1").unlink()
        (folder / f"run.{RANK}.1").mkdir()
    COMM.mpi_comm.Barrier()
    with pytest.raises(OSError):
        checkpointer.save(model, 1)
    checkpointer.save(model, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert create_multi_node_checkpointer("run", COMM, path=folder).maybe_load(model) == 2
    assert (folder / f"run.{SIZE - 1}.1").is_dir()


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
def test_old_checkpoints_of_fewer_ranks(folder):
    model = L.Linear(2, 3)
    if RANK < SIZE - 1:
        chainer.serializers.save_npz(str(folder / f"run.{RANK}.3"), model)
    COMM.mpi_comm.Barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert create_multi_node_checkpointer("run", COMM, path=folder).maybe_load(model) is None
    assert ["not all ranks can load them: run.0.3" in str(each.message) for each in caught] == [True] * (RANK == 0)


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
def test_another_number_of_ranks(folder):
    half = COMM.split(RANK % 2, RANK)
    model = L.Linear(2, 3)
    if RANK % 2 == 0:
        create_multi_node_checkpointer("run", half, path=folder).save(model, 1)
    COMM.mpi_comm.Barrier()
    checkpointer = create_multi_node_checkpointer("run", COMM, path=folder)
    before = model.W.data.copy()
    with pytest.raises(
        ValueError, match=rf"expected a checkpoint of {SIZE} ranks, got one of {(SIZE + 1) // 2}.*manifest"
    ):
        checkpointer.maybe_load(model)
    np.testing.assert_array_equal(model.W.data, before)
    half.finalize()


def test_another_model(folder):
    trainer, _, _ = training(folder)
    run_and_die(trainer, 1)
    before = names(folder)
    trainer, checkpointer, optimizer = training(folder, model=MLP(5) if RANK == SIZE - 1 else None)
    with pytest.raises(ValueError, match=r"a different model: .*model:main/l[12]"):
        checkpointer.maybe_load(trainer, optimizer)
    assert trainer.updater.iteration == 0
    assert optimizer.target.l1.W.data is None
    assert not optimizer.is_synchronized
    assert names(folder) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("a/b",), ValueError, "expected a name without path separators"),
        (("",), ValueError, "expected a name without path separators"),
        ((None,), TypeError, "expected a string for name"),
        (("run", 0), ValueError, "expected cp_interval of at least 1, got 0"),
        (("run", 1, 0), ValueError, "expected gc_interval of at least 1, got 0"),
    ],
)
def test_bad_arguments_on_one_rank(arguments, error, message):
    name, *rest = arguments if RANK == SIZE - 1 else ("run",)
    with pytest.raises(error, match=message):
        create_multi_node_checkpointer(name, COMM, *rest)


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
def test_names_that_differ(folder):
    with pytest.raises(ValueError, match="expected the same name"):
        create_multi_node_checkpointer("run" if RANK else "another", COMM, path=folder)


def test_a_folder_that_cannot_be_written_on_one_rank(folder):
    (folder / "file").touch()
    path = folder / "file" if RANK == SIZE - 1 else folder / "run"
    with pytest.raises(OSError if RANK == SIZE - 1 else Exception):
        create_multi_node_checkpointer("run", COMM, path=path)
    trainer, checkpointer, _ = training(path)
    with pytest.raises(Exception, match=r"rank|File exists"):
        checkpointer.maybe_load(trainer)


def test_python_objects_on_one_rank(folder):
    class Odd(chainer.Link):
        def serialize(self, serializer):
            serializer("odd", np.asarray({1}) if RANK == SIZE - 1 else np.ones(1))

    checkpointer = create_multi_node_checkpointer("run", COMM, path=folder)
    with pytest.raises(TypeError, match="without Python objects"):
        checkpointer.save(Odd(), 1)
    assert not any("manifest" in name for name in names(folder))


def test_saving_without_a_folder():
    checkpointer = create_multi_node_checkpointer("run", COMM)
    with pytest.raises(RuntimeError, match="expected a folder"):
        checkpointer.save(L.Linear(2, 3), 1)


@pytest.fixture
def small_disk(folder):
    """A disk of 1 MB on the last rank, and a large one on the others."""
    path = folder / "small"
    mounted = None
    if RANK == SIZE - 1:
        path.mkdir()
        mount = shutil.which("mount")
        command = [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
        mounted = mount is not None and subprocess.run(command, capture_output=True).returncode == 0
    if not COMM.bcast_obj(mounted, root=SIZE - 1):
        pytest.skip("may not mount a small tmpfs here")
    yield path if RANK == SIZE - 1 else folder
    if RANK == SIZE - 1:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_fills_up(small_disk, folder):
    model = L.Linear(2, 3)
    checkpointer = create_multi_node_checkpointer("run", COMM, path=small_disk)
    checkpointer.save(model, 1)
    model.add_persistent("large", np.zeros(2**20, "f4"))
    with pytest.warns(
        RuntimeWarning, match=r"iteration 2 was not saved: rank \d cannot write .*run\.\d\.2: .*No space"
    ):
        checkpointer.save(model, 2)
    assert not os.path.exists(small_disk / f"run.{RANK}.2")
    model = L.Linear(2, 3)
    assert create_multi_node_checkpointer("run", COMM, path=small_disk).maybe_load(model) == 1
    model.W.data[...] = 3
    checkpointer.save(model, 3)  # there is room for this one
    assert create_multi_node_checkpointer("run", COMM, path=small_disk).maybe_load(model) == 3


def test_stats(folder):
    checkpointer = create_multi_node_checkpointer("run", COMM, path=folder)
    assert checkpointer.get_stats() == "nothing was saved yet"
    before = time.time()
    checkpointer.save(L.Linear(2, 3), 1)
    assert re.match(r"1 checkpoints saved, seconds for each: mean \d+\.\d", checkpointer.get_stats())
    assert checkpointer.get_stats() == checkpointer.stats.report()
    (timing,) = checkpointer.stats.timings
    assert before <= timing["b"] <= time.time()
    assert 0 < timing["d"] < 60
    checkpointer.stats.end()  # nothing is running
    assert len(checkpointer.stats.timings) == 1


def test_files(folder):
    checkpointer = create_multi_node_checkpointer("run", COMM, 2, 3, path=folder)
    assert checkpointer.files == []
    for iteration in (9, 10, 11):
        checkpointer.save(L.Linear(2, 3), iteration)
    assert checkpointer.files == [f"run.{RANK}.10", f"run.{RANK}.11"]
    other = create_multi_node_checkpointer("run", COMM, path=folder)
    other.maybe_load(L.Linear(2, 3))
    assert other.files == checkpointer.files
    other.finalize()
    assert other.files == []
