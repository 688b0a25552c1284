"""Use every capability again and again, and check that a process does not grow.

    mpiexec -n 2 python tools/soak.py --minutes 20

Each round creates what it uses, takes a few real steps with it, and drops it: communicators and their parts, every
strategy, ways to communicate, compressions, scattered datasets, iterators, evaluators, checkpoints and snapshots. After
each round every rank counts the bytes that malloc has handed out, the blocks of Python's own allocator, its private
and shared memory, open files, threads and MPI communicators. After the first minute (in a run of less than three
minutes, or of ``--rounds``: after its first third) memory may grow by 1 %, and the others not at all. The script ends
with status 1 if something grew, and names it, with the tasks during which it grew. If only private memory grew, nothing
has leaked: allocators take it in large pieces, Python's in pieces of 1 MiB, and not all of a piece is used.

UCX, which MPICH's wheel contains, keeps 150 bytes each time that memory is returned to the system, forever. The script
switches this off, by ``UCX_MEM_EVENTS=n``; see docs/troubleshooting/system.md.

With Open MPI, started by ``mpiexec --with-ft ulfm``, steps of elastic communicators are among the tasks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("UCX_MEM_EVENTS", "n")  # before MPI is started
sys.path.append(str(Path(__file__).parents[1] / "packages/mn-comm/tests/fakes"))

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainermn.iterators import create_multi_node_iterator, create_synchronized_iterator, create_uneven_iterator
from communicators import number_of_communicators
from mpi4py import MPI

import mn_comm
from mn_comm.building_blocks import STRATEGIES
from mn_compress import Int8, OneBit, PowerSGD, TopK
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

WORLD = MPI.COMM_WORLD
STEPS = 4
MEMORY_MAY_GROW = 0.01
COUNTED = ("descriptors", "threads", "communicators")
BYTES = ("malloc", "private memory", "shared memory")
MEMORY = (*BYTES, "Python's blocks")
WHEN = {
    "after backward": AfterBackward(),
    "during backward": DuringBackward(),
    "one step late": OneStepLate(),
    "sharded": Sharded(),
    "sharded, during backward": Sharded(DuringBackward()),
    "local SGD": LocalSGD(2),
    "local SGD, compressed": LocalSGD(2, send=Int8()),
    "DiLoCo": DiLoCo(2),
    "streaming DiLoCo": StreamingDiLoCo(4, fragments=2),
    "asynchronous": Asynchronous(max_staleness=2, interval=0.0),
    "synchronous first": SynchronousFirst(2, LocalSGD(2)),
    "int8": AfterBackward(send=Int8()),
    "top-k": DuringBackward(send=TopK()),
    "one bit": OneStepLate(send=OneBit()),
    "power SGD": AfterBackward(send=PowerSGD()),
    "a hook": AfterBackward(send=lambda bucket: bucket.average()),
}


class Network(chainer.Chain):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(16, 64)
            self.norm = L.BatchNormalization(64)
            self.l2 = L.Linear(64, 4)

    def forward(self, x: Any) -> Any:
        """Return the scores of each class."""
        return self.l2(F.relu(self.norm(self.l1(x))))


def samples(number: int = 32) -> chainer.datasets.TupleDataset:
    """Return random samples."""
    random = np.random.RandomState(WORLD.rank)
    return chainer.datasets.TupleDataset(
        random.rand(number, 16).astype("f4"), random.randint(0, 4, number).astype("i4")
    )


def train(comm: Any, when: Any = True, steps: int = STEPS) -> MultiNodeOptimizer:
    """Take some steps with a new model and a new optimizer; return the optimizer."""
    model = L.Classifier(Network())
    optimizer = MultiNodeOptimizer(chainer.optimizers.Adam(), comm, when).setup(model)
    x, t = chainer.dataset.concat_examples(samples(8))
    for _ in range(steps):
        optimizer.update(model, x, t)
    return optimizer


@contextlib.contextmanager
def own_ranks() -> Iterator[MPI.Intracomm]:
    """Yield a duplicate of all ranks, which is freed at the end, with all that is derived from it."""
    ranks = WORLD.Dup()
    try:
        yield ranks
    finally:
        gc.collect()
        ranks.Free()


class Tasks:
    """All tasks of a round, by name. Some use one lasting communicator, others create their own.

    Args:
        folder: An empty folder, the same on all ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.comm = mn_comm.create_communicator("two_dimensional")
        self.elastic = create_elastic()

    def all(self) -> dict[str, Callable[[], object]]:
        """Return the tasks."""
        found: dict[str, Callable[[], object]] = {}
        for name, kind in STRATEGIES.items():
            if kind.on_host:
                found[f"strategy {name}"] = lambda name=name: self.strategy(name)
        for name, when in WHEN.items():
            found[name] = lambda when=when: self.steps(when)
        found |= {
            "every way on ranks of its own": self.on_own_ranks,
            "join": self.join,
            "split": self.split,
            "collectives": self.collectives,
            "objects": self.objects,
            "point to point": self.point_to_point,
            "scatter": self.scatter,
            "iterators": self.iterators,
            "functions": self.functions,
            "normalization": self.normalization,
            "trainer": self.trainer,
            "errors": self.errors,
        }
        if self.elastic is not None:
            found["elastic steps"] = self.elastic_steps
        return found

    def strategy(self, name: str) -> None:
        """Train with a strategy, on ranks of its own and on the lasting ones."""
        with own_ranks() as ranks:
            comm = mn_comm.create_communicator(name, ranks)
            train(comm)
            comm.finalize()
        half = mn_comm.create_communicator(name, allreduce_grad_dtype="float16")
        train(half, steps=2)

    def steps(self, when: Any) -> None:
        """Train in one of the ways to communicate."""
        optimizer = train(self.comm, when)
        optimizer.synchronize()

    def on_own_ranks(self) -> None:
        """Create, use and free all communicators that the ways to communicate derive."""
        with own_ranks() as ranks:
            comm = mn_comm.create_communicator("hierarchical", ranks)
            for when in (DuringBackward(), Asynchronous(interval=0.0), StreamingDiLoCo(4)):
                train(comm, when).synchronize()

    def join(self) -> None:
        """Train while ranks have data for different numbers of steps."""
        optimizer = train(self.comm, steps=2)
        x, t = chainer.dataset.concat_examples(samples(8))
        with optimizer.join():
            for _ in range(2 + 2 * WORLD.rank):
                optimizer.update(optimizer.target, x, t)

    def split(self) -> None:
        """Split the ranks, in the same ways each time, and average within the parts."""
        for color in (0, WORLD.rank):
            part = self.comm.split(color, WORLD.rank)
            train(part, steps=2)

    def collectives(self) -> None:
        """Call each collective on small and on large arrays."""
        comm, size = self.comm, self.comm.size
        for length in (3, 100_000):
            array = np.ones(length * size, "f4")
            comm.bcast(array)
            comm.gather(array)
            comm.allgather(array)
            comm.scatter([array] * size if comm.rank == 0 else None)
            comm.alltoall(tuple(np.full(n + 1, n, "f4") for n in range(size)))
            comm.allreduce(array)
            comm.reduce(array)
            comm.reduce_scatter(array)
            comm.barrier()

    def objects(self) -> None:
        """Exchange objects, small ones and some larger than a piece."""
        comm = self.comm
        for thing in ({"rank": comm.rank}, list(range(20_000)), np.zeros(300_000)):
            comm.bcast_obj(thing, max_buf_len=1 << 20)
            comm.gather_obj(thing)
            comm.allgather_obj(thing)
            comm.scatter_obj([thing] * comm.size if comm.rank == 0 else None)
        comm.allreduce_obj(1.0)

    def point_to_point(self) -> None:
        """Send arrays and objects around."""
        comm = self.comm
        if comm.size < 2 or comm.rank > 1:
            return
        for length in (3, 100_000):
            array = np.ones(length, "f4")
            if comm.rank == 0:
                comm.send(array, 1)
                comm.send_obj([length], 1)
                comm.recv(1)
            else:
                comm.recv(0)
                comm.recv_obj(0)
                comm.send((array, array), 0)

    def scatter(self) -> None:
        """Scatter datasets and indices."""
        for dataset in (samples(1000), list(range(1000)), np.zeros((1000, 64), "f4")):
            chainermn.scatter_dataset(dataset, self.comm, shuffle=True, seed=0, max_buf_len=1 << 16)
        chainermn.scatter_index(1000, self.comm)

    def iterators(self) -> None:
        """Use each iterator for an epoch."""

        def serial() -> chainer.iterators.SerialIterator:
            return chainer.iterators.SerialIterator(samples(), 8, repeat=False)

        for made in (create_multi_node_iterator(serial(), self.comm), create_uneven_iterator(serial(), self.comm)):
            for _ in made:
                pass
        shuffled = create_synchronized_iterator(chainer.iterators.SerialIterator(samples(), 8), self.comm)
        for _ in range(5):
            next(shuffled)

    def functions(self) -> None:
        """Run the differentiable collectives forwards and backwards."""
        comm = self.comm
        x = chainer.Variable(np.ones((comm.size, 4), "f4"))
        y = chainermn.functions.allreduce(comm, x) + chainermn.functions.bcast(comm, x)
        y += F.stack(chainermn.functions.allgather(comm, x[comm.rank]))
        F.sum(y).backward()

    def normalization(self) -> None:
        """Train with batch normalization over all ranks."""
        link = chainermn.links.MultiNodeBatchNormalization(16, self.comm)
        for _ in range(STEPS):
            F.sum(link(np.ones((4, 16), "f4"))).backward()

    def trainer(self) -> None:
        """Run Chainer's trainer with evaluator, checkpoints, snapshots and observations; then continue from them."""
        comm, out = self.comm, self.folder / "out"
        for epochs in (1, 2):
            made = self.trainer_of(epochs, out)
            checkpointer = chainermn.create_multi_node_checkpointer("soak", comm, path=str(out))
            checkpointer.maybe_load(made)
            made.extend(checkpointer, trigger=(2, "iteration"))
            made.run()
            checkpointer.finalize()
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(out)
        comm.barrier()

    def trainer_of(self, epochs: int, out: Path) -> chainer.training.Trainer:
        """Return a trainer with all extensions but the checkpointer."""
        comm, extensions = self.comm, chainermn.extensions
        model = L.Classifier(Network())
        optimizer = MultiNodeOptimizer(chainer.optimizers.Adam(), comm).setup(model)
        updater = chainer.training.StandardUpdater(chainer.iterators.SerialIterator(samples(), 8), optimizer)
        made = chainer.training.Trainer(updater, (epochs, "epoch"), out=str(out))
        evaluated = chainer.iterators.SerialIterator(samples(16), 8, repeat=False, shuffle=False)
        evaluator = chainer.training.extensions.Evaluator(evaluated, model)
        made.extend(chainermn.create_multi_node_evaluator(evaluator, comm), trigger=(1, "epoch"))
        snapshot = chainer.training.extensions.snapshot(n_retains=1)
        made.extend(extensions.multi_node_snapshot(comm, snapshot, [range(comm.size)]), trigger=(1, "epoch"))
        made.extend(extensions.ObservationAggregator(comm, "main/loss", "mean/loss"))
        made.extend(extensions.AllreducePersistent(model, comm), trigger=(1, "epoch"))
        made.extend(chainer.training.extensions.LogReport(trigger=(1, "epoch")))
        return made

    def errors(self) -> None:
        """Make mistakes that all ranks raise, and continue."""
        for call in (
            lambda: self.comm.allreduce("no array"),
            lambda: self.comm.bcast_obj(self.unpicklable()),
            lambda: self.comm.allreduce(np.ones(1 + self.comm.rank)),
        ):
            with contextlib.suppress(Exception):
                call()
        self.comm.barrier()

    def unpicklable(self) -> Any:
        """Return an object that cannot be sent."""
        return lambda: None

    def elastic_steps(self) -> None:
        """Train with a communicator that survives losses, of which there is none."""
        for when in (True, DuringBackward(), OneStepLate()):
            train(self.elastic, when)
        self.elastic.transact(lambda: self.elastic.allreduce(np.ones(10)))


def create_elastic() -> Any:
    """Return an elastic communicator, or ``None`` if the job cannot have one."""
    try:
        return mn_comm.create_communicator("two_dimensional", elastic=True)
    except (RuntimeError, ImportError) as error:
        if WORLD.rank == 0:
            print(f"without elastic communicators: {str(error).splitlines()[0]}", flush=True)
        return None


class Extent(NamedTuple):
    """How long to soak.

    Attributes:
        unit: "seconds" or "rounds".
        length: After how many of them to end.
        settled: After how many of them nothing may grow.
    """

    unit: str
    length: float
    settled: float


# Numbers by name, one for each round. In lists, they would be a part of what grows.
Numbers = defaultdict[str, "array[float]"]


def numbers() -> Numbers:
    """Return no numbers; an object that can be sent."""
    return defaultdict(partial(array, "d"))


def count() -> dict[str, float]:
    """Return what this process uses now; collective."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "malloc": allocated(),
        "Python's blocks": float(sys.getallocatedblocks()),
        "private memory": private_dirty(),
        "shared memory": 1024.0 * int(status["RssShmem"].split()[0]),
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(status["Threads"]),
        "communicators": float(number_of_communicators()),
    }


def private_dirty() -> float:
    """Return the private bytes of this process that it has written.

    Others, of files, are private or not depending on which other programs run.
    """
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024.0 * next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_Dirty:"))


class Malloc(ctypes.Structure):
    """What glibc's mallinfo2() returns: numbers of bytes, unless their names say otherwise."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena n_free n_fast n_mapped mapped unused fast_free used free releasable".split()
    )


def allocated() -> float:
    """Return how many bytes malloc has handed out; 0 if the C library does not tell."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0.0
    mallinfo2.restype = Malloc
    found = mallinfo2()
    return float(found.used + found.mapped)


def private_memory() -> float:
    """Return about how many private bytes of this process are in memory, without garbage."""
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return float((int(fields[1]) - int(fields[2])) * resource.getpagesize())


def fill_buffers_of_early_messages(messages: int = 512) -> None:
    """Let MPI create its buffers for messages that nobody receives yet; collective.

    MPICH keeps such messages in pieces of 1 MiB, and creates another piece, which it never frees, whenever more of them
    wait than ever before. When this happens depends on the timing of the ranks, so it must not happen after the first
    minute.

    Args:
        messages: How many wait at the same time: more than in any task.
    """
    right, left = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size
    message = np.zeros(1 << 11, "u1")  # so short that it is sent before its receiver asks for it
    requests = [WORLD.Isend(message, right) for _ in range(messages)]
    for _ in range(100 * messages):  # both ranks have to receive, so that both can go on sending
        if MPI.Request.Testall(requests):
            break
    WORLD.Barrier()
    for _ in range(messages):
        WORLD.Recv(np.empty_like(message), left)
    MPI.Request.Waitall(requests)


def fill_table_of_interned_strings() -> None:
    """Let Python enlarge its table of interned strings, which it does once, to twice its size.

    The slot of a string that is gone is used again only after all slots have been used once.
    """
    for number in range(1 << 17):
        sys.intern(f"soak {number}")


def soak(tasks: dict[str, Callable[[], object]], extent: Extent) -> tuple[Numbers, dict[str, float]]:
    """Run all tasks, round after round, on all ranks for the same number of rounds; collective.

    Args:
        tasks: The tasks by name.
        extent: For how long.

    Returns:
        What the process had after each round, with the seconds since the start; and by task, how much memory grew after
        it had settled.
    """
    began = time.monotonic()
    found = numbers()
    growth = dict.fromkeys(tasks, 0.0)
    so_far = 0.0
    while WORLD.bcast(so_far < extent.length):
        before = private_memory()
        for name, task in tasks.items():
            task()
            after = private_memory()
            growth[name] += after - before if so_far >= extent.settled else 0.0
            before = after
        for name, number in count().items():
            found[name].append(number)
        found["seconds"].append(time.monotonic() - began)
        found["rounds"].append(len(found["seconds"]))
        so_far = found[extent.unit][-1]
    return found, growth


def judge(found: Numbers, extent: Extent, growth: float = MEMORY_MAY_GROW) -> dict[str, tuple[float, float]]:
    """Return what grew, by name: its value when it had settled, and its value at the end.

    Memory is judged by medians of fifths of the rounds, as single rounds vary.

    Args:
        found: What the process had, in order.
        extent: For how long.
        growth: The share by which memory may grow nevertheless.
    """
    late = first_settled(found, extent)
    part = max(1, (len(found["seconds"]) - late) // 5)
    grown = {}
    for name in (*MEMORY, *COUNTED):
        middle = statistics.median if name in MEMORY else max
        later = found[name][late:]
        first, last = middle(later[:part]), middle(later[-part:])
        if last > first * (1 + (growth if name in MEMORY else 0)):
            grown[name] = (first, last)
    return grown


def first_settled(found: Numbers, extent: Extent) -> int:
    """Return the index of the first round after which nothing may grow, or else of the last one."""
    ends = found[extent.unit]
    return next((i for i, each in enumerate(ends) if each >= extent.settled), len(ends) - 1)


def main() -> int:
    """Soak, print the figures of each rank, and return 1 if something grew on any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="for how long")
    parser.add_argument("--rounds", type=int, default=0, help="for how many rounds, instead of minutes")
    parser.add_argument("--growth", type=float, default=MEMORY_MAY_GROW, help="the share by which memory may grow")
    parser.add_argument("--only", default="", help="the tasks whose name contains this")
    parser.add_argument("--leak", choices=("memory", "objects", "descriptors", "communicators"), help=argparse.SUPPRESS)
    parser.add_argument("--json", default="", help="a file for all numbers of all ranks, by round")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else ""))
    tasks = {name: task for name, task in Tasks(folder).all().items() if args.only in name}
    if args.leak:
        tasks["a leak"] = leak(args.leak)
    fill_buffers_of_early_messages()
    fill_table_of_interned_strings()
    extent = extent_of(args.minutes, args.rounds)
    found, growth = soak(tasks, extent)
    grown = judge(found, extent, args.growth)
    reports = WORLD.gather((found, growth, grown))
    if WORLD.rank == 0:
        shutil.rmtree(folder)
        if args.json:
            ranks = [{name: each.tolist() for name, each in found.items()} for found, _, _ in reports]
            Path(args.json).write_text(json.dumps(ranks) + "\n")
        for rank, report in enumerate(reports):
            show(rank, len(tasks), extent, *report)
    return int(any(WORLD.allgather(bool(grown))))


def extent_of(minutes: float, rounds: int) -> Extent:
    """Return how long to soak: some rounds, or if there are none, some minutes."""
    if rounds:
        return Extent("rounds", rounds, rounds / 3)
    seconds = 60 * minutes
    return Extent("seconds", seconds, 60.0 if seconds >= 180 else seconds / 3)


def show(
    rank: int,
    n_tasks: int,
    extent: Extent,
    found: Numbers,
    growth: dict[str, float],
    grown: dict[str, tuple[float, float]],
) -> None:
    """Print the figures of a rank."""
    print(f"rank {rank}: {len(found['seconds'])} rounds of {n_tasks} tasks in {found['seconds'][-1]:.0f} s")
    late = first_settled(found, extent)
    for name in (*MEMORY, *COUNTED):
        first, last = found[name][late], found[name][-1]
        unit, scale, digits = (" MB", 1e6, 2) if name in BYTES else ("", 1, 0)
        verdict = "GREW" if name in grown else "flat"
        then, now = (f"{number / scale:12,.{digits}f}{unit}" for number in (first, last))
        print(f"  {name:16}{then} after {extent.settled:.0f} {extent.unit}, {now} now: {verdict}")
    if grown.keys() & set(MEMORY):
        most = sorted(growth, key=lambda name: -growth[name])[:5]
        print("  most during: " + ", ".join(f"{name} ({growth[name] / 1e6:+.2f} MB)" for name in most))


def leak(kind: str) -> Callable[[], object]:
    """Return a task that leaks, to see that it is found."""
    kept: list[Any] = []
    return {
        "memory": lambda: kept.append(bytearray(os.urandom(1_000_000))),
        "objects": lambda: kept.append([object() for _ in range(20_000)]),
        "descriptors": lambda: kept.append(os.dup(0)),
        "communicators": lambda: kept.append(WORLD.Dup()),
    }[kind]


if __name__ == "__main__":
    status = main()  # not in the call: on Python 3.10 and 3.11, the communicators would not see the status
    sys.exit(status)
