"""Checkpoints that the ChainerMN in Chainer's wheel has written: they are resumed, and never replaced or removed."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.rest

RANKS = 2
LAST = 4  # the iteration after which the old training died

SCRIPT = """
import hashlib, os, sys
import numpy as np

if os.environ.get("CHAINERMN_IMPL") == "bundled":
    import mn_compat
    from chainermn import create_communicator, create_multi_node_checkpointer
    import chainermn
    assert os.path.basename(os.path.dirname(os.path.dirname(chainermn.__file__))) == "site-packages"
else:
    from mn_comm import create_communicator
    from mn_extensions import create_multi_node_checkpointer
import chainer
import chainer.functions as F
import chainer.links as L
from chainer.training import extensions

stop, dies, loads, keep = int(sys.argv[1]), "dies" in sys.argv, "loads" in sys.argv, int(sys.argv[2])
comm = create_communicator("naive")


class Optimizer(chainer.optimizers.Adam):
    def update(self, lossfun, *args):
        self.target.cleargrads()
        lossfun(*args).backward()
        comm.multi_node_mean_grad(self.target)
        super().update()


class MLP(chainer.Chain):
    def __init__(self):
        super().__init__(l1=L.Linear(None, 8), bn=L.BatchNormalization(8), l2=L.Linear(8, 3))
        self.add_persistent("nothing", None)

    def forward(self, x):
        return self.l2(self.bn(self.l1(x)))


np.random.seed(0)
random = np.random.RandomState(comm.rank)
data = chainer.datasets.TupleDataset(random.rand(50, 5).astype("f4"), random.randint(0, 3, 50).astype("i4"))
model = L.Classifier(MLP())
model.predictor.l1(data[:2][0][0][None])  # initialised alike on all ranks
optimizer = Optimizer().setup(model)
updater = chainer.training.StandardUpdater(chainer.iterators.SerialIterator(data, 8), optimizer)
trainer = chainer.training.Trainer(updater, (stop, "iteration"), out="result")
checkpointer = create_multi_node_checkpointer("run", comm, cp_interval=keep, gc_interval=1)
trainer.extend(checkpointer, name="renamed" if "renamed" in sys.argv else None, trigger=(1, "iteration"))
trainer.extend(extensions.ExponentialShift("alpha", 0.9), trigger=(1, "iteration"))
if comm.rank == 0:
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))


def die(trainer):
    if trainer.updater.iteration == stop:
        comm.mpi_comm.Barrier()
        os._exit(0)


def digest():
    hashed = hashlib.md5()
    for name, param in sorted(model.namedparams()):
        state = param.update_rule.state or {}
        for array in [param.data, *(state[key] for key in sorted(state))]:
            hashed.update(repr(None if array is None else np.asarray(array).tolist()).encode())
    hashed.update(repr((optimizer.t, optimizer.alpha, updater.get_iterator("main")._state.order.tolist())).encode())
    return hashed.hexdigest()


if dies:
    trainer.extend(die, name="die", priority=-300, trigger=(1, "iteration"))
if loads:
    checkpointer.maybe_load(trainer, optimizer)
    print(f"rank {comm.rank} resumed at {updater.iteration} {digest()}", flush=True)
if updater.iteration < stop:
    trainer.run(show_loop_exception_msg=False)
print(f"rank {comm.rank} ended at {updater.iteration} {digest()}", flush=True)
"""


def run(folder, implementation, stop, *words, keep=100):
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    command = [launcher, "-n", str(RANKS), sys.executable, "-c", SCRIPT, str(stop), str(keep), *words]
    environ = {**os.environ, "CHAINERMN_IMPL": implementation}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


def lines(job, word):
    """Return the iteration, and the states of the ranks, with which they resumed or ended."""
    found = sorted(re.findall(rf"rank (\d) {word} at (\d+) ([0-9a-f]{{32}})", job.stdout))
    assert [rank for rank, _, _ in found] == ["0", "1"], job.stdout + job.stderr
    assert len({iteration for _, iteration, _ in found}) == 1
    return int(found[0][1]), [state for _, _, state in found]


def files(folder):
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in (folder / "result").glob("run.*")}


def names(iterations, owners=range(RANKS)):
    return {f"run.{owner}.{iteration}" for owner in owners for iteration in iterations}


@pytest.fixture(scope="module")
def of_the_old_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    job = run(folder, "bundled", LAST, "dies")
    assert set(files(folder)) == names(range(1, LAST + 1)), job.stdout + job.stderr
    return folder


@pytest.fixture
def old(of_the_old_one, tmp_path):
    """A folder with the old checkpoints, which the test may change."""
    return Path(shutil.copytree(of_the_old_one, tmp_path / "copy"))


def test_the_training_goes_on_as_it_did(old, of_the_old_one, tmp_path):
    reference = Path(shutil.copytree(of_the_old_one, tmp_path / "reference"))
    expected = run(reference, "bundled", LAST + 3, "loads")
    job = run(old, "ours", LAST + 3, "loads")
    assert lines(expected, "resumed")[0] == LAST
    assert lines(job, "resumed") == lines(expected, "resumed")
    assert lines(job, "ended") == lines(expected, "ended")
    assert (job.returncode, job.stderr) == (0, "")
    assert files(old) == files(of_the_old_one)  # it ended normally: its own files are removed


def test_own_files_are_collected_and_old_ones_are_not(old, of_the_old_one):
    before = files(of_the_old_one)
    run(old, "ours", LAST + 3, "loads", "dies", keep=1)
    after = files(old)
    assert set(after) == set(before) | names([LAST + 3], [*range(RANKS), "manifest"])
    assert {name: after[name] for name in before} == before
    resumed = run(old, "ours", LAST + 3, "loads")  # its own are newer now
    assert lines(resumed, "resumed")[0] == LAST + 3


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_newest_iteration_that_every_rank_has(old, tmp_path, rank):
    (old / "result" / f"run.{rank}.{LAST}").unlink()
    before = files(old)
    reference = Path(shutil.copytree(old, tmp_path / "reference"))
    expected = lines(run(reference, "bundled", LAST - 1, "loads"), "resumed")
    job = run(old, "ours", LAST + 1, "loads")
    assert expected[0] == LAST - 1
    assert lines(job, "resumed") == expected
    # The next checkpoint would replace an existing one.
    in_the_way = f"run.{1 - rank}.{LAST}"
    assert f"not all ranks can load them: {in_the_way};" in job.stderr
    assert job.returncode != 0
    assert "FileExistsError" in job.stderr
    assert "ended" not in job.stdout
    assert {name: each for name, each in files(old).items() if name in before} == before
    assert not names([LAST], [rank, "manifest"]) & set(files(old))


def test_an_extension_under_another_name(tmp_path):
    """The old one named the files after it; now the run has its own name."""
    run(tmp_path, "bundled", LAST, "dies", "renamed")
    renamed = {f"renamed.{rank}.{i}" for rank in range(RANKS) for i in range(1, LAST + 1)}
    assert set(os.listdir(tmp_path / "result")) - {"log"} == renamed
    job = run(tmp_path, "ours", LAST + 1, "loads", "dies", "renamed")
    assert lines(job, "resumed")[0] == LAST
    assert "Warning" not in job.stderr
    assert set(os.listdir(tmp_path / "result")) - {"log"} == renamed | names([LAST + 1], [*range(RANKS), "manifest"])
    assert lines(run(tmp_path, "ours", LAST + 1, "loads", "renamed"), "resumed")[0] == LAST + 1


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    """Change a bit in the middle of an array."""
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("updater/model:main/predictor/l1/W.npy")
    content = bytearray(path.read_bytes())
    header = member.header_offset
    of_names = sum(int.from_bytes(content[header + begin : header + begin + 2], "little") for begin in (26, 28))
    content[header + 30 + of_names + member.compress_size // 2] ^= 16
    path.write_bytes(content)


class Trap:
    def __reduce__(self):
        return os.system, ("echo trapped",)


def trap(path):
    """Replace a None by a pickle that runs a command."""
    with np.load(path, allow_pickle=True) as archive:
        arrays = dict(archive)
    (name,) = [name for name, array in arrays.items() if array.dtype == object and name.endswith("/nothing")]
    arrays[name] = np.asarray(Trap())
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


@pytest.mark.parametrize("damage", [cut, empty, flip, trap])
def test_a_file_that_cannot_be_read_is_passed_over(old, damage):
    path = old / "result" / f"run.1.{LAST}"
    damage(path)
    before = files(old)
    job = run(old, "ours", LAST - 1, "loads")
    assert job.returncode == 0, job.stdout + job.stderr
    assert lines(job, "resumed")[0] == LAST - 1
    assert f"run.1.{LAST} cannot be read: " in job.stderr
    assert "trapped" not in job.stdout + job.stderr
    assert files(old) == before


def test_none_is_in_the_files(old):
    """Otherwise, the tests above would not notice that one is read."""
    with zipfile.ZipFile(old / "result" / "run.0.1") as archive:
        assert b"'|O'" in archive.read("updater/model:main/predictor/nothing.npy")


@pytest.mark.parametrize("left", ["old files", "another program's"])
def test_a_new_training_does_not_replace_what_is_there(old, left):
    if left != "old files":
        for path in (old / "result").glob("run.*"):
            path.unlink()
        (old / "result" / "run.1.1").write_text("notes")
    before = files(old)
    job = run(old, "ours", LAST)
    assert job.returncode != 0
    assert "FileExistsError: expected no file of another program" in job.stderr, job.stderr
    assert files(old) == before
