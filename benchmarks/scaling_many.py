"""Many ranks on one machine: memory, the collectives beside MPI's own, and the whole life of a job.

``scaling.py --many 16,64,256`` runs this. The ranks pretend to run on nodes of eight ranks each. Far more ranks than
cores spend most of their time waiting for a core, so seconds are only comparable within a row: ours beside MPI's.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["JOBS", "many", "run"]

HERE = Path(__file__).resolve().parent
NODE = 8
ROUNDS = 5
LENGTH = 1024  # float32 for each rank
WITH_CHAINER = ("chainer",)
ENDS_BADLY = ("abort",)
WHOSE = ("ours", "MPI's")
STALL_SECONDS = "2"


def many(sizes: Sequence[int], jobs: Sequence[str], out: Path, *, most_with_chainer: int, limit: float) -> None:
    """Run jobs with each number of ranks, and write a table of what they measured; keep what was measured before.

    Args:
        sizes: The numbers of ranks.
        jobs: The names of the jobs.
        out: The folder for the results.
        most_with_chainer: Jobs with Chainer, which need more memory, have at most this many ranks.
        limit: The seconds after which a job counts as hung.
    """
    file = out / "scaling-many.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for ranks in sizes:
        for what in jobs:
            if what in WITH_CHAINER and ranks > most_with_chainer:
                print(f"{what} on {ranks} ranks: left out, needs more memory than allowed", flush=True)
                continue
            line = {"mpi": name_of_mpi(), **start(what, ranks, limit)}
            print(json.dumps(line), flush=True)
            key = [line[name] for name in ("mpi", "job", "ranks")]
            found = [each for each in found if [each[name] for name in ("mpi", "job", "ranks")] != key]
            found.append(line)
            file.write_text("".join(json.dumps(each) + "\n" for each in found))
    report = as_text(found)
    (out / "scaling-many.md").write_text(report)
    print(report)


def name_of_mpi() -> str:
    """Return the name of the MPI library whose launcher is used."""
    said = subprocess.run([launcher(), "--version"], capture_output=True, text=True, check=True).stdout
    return "MPICH" if "HYDRA" in said else "Open MPI"


def launcher() -> str:
    """Return the path of mpiexec."""
    return shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"


def start(what: str, ranks: int, limit: float) -> dict[str, Any]:
    """Run a job, and return what rank 0 measured, and the seconds from its end until the launcher's.

    Raises:
        RuntimeError: It hung, or did not end as it must.
    """
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CHAINERMN_STALL_SECONDS": STALL_SECONDS if what == "stall" else "0",
    }
    command = [launcher(), "-n", str(ranks), sys.executable, str(HERE / "scaling.py"), "--many-job", what]
    # Not to stdout: what a rank prints just before the job is aborted may be lost.
    with tempfile.NamedTemporaryFile() as file:
        began = time.time()
        try:
            done = subprocess.run([*command, file.name], env=environ, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{what} on {ranks} ranks hung for {limit:.0f} s: {error.stderr}") from None
        ended = time.time()
        written = Path(file.name).read_text()
    if (done.returncode != 0) != (what in ENDS_BADLY) or not written:
        raise RuntimeError(f"{what} on {ranks} ranks ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    figures = json.loads(written)
    figures["seconds"]["until the first line"] = figures.pop("began") - began
    figures["seconds"]["end"] = ended - figures.pop("ended")
    if what == "stall":
        figures["messages"] = done.stderr.count(" has waited for ")
    return {"job": what, "ranks": ranks, **figures}


def run(what: str, file: str) -> None:
    """Run a job on every rank; write what was measured on rank 0 to a file."""
    began = time.time()
    from mpi4py import MPI

    node = MPI.COMM_WORLD.rank // NODE
    MPI.Get_processor_name = lambda: f"node{node}"  # type: ignore[method-assign]
    MPI.COMM_WORLD.Barrier()
    figures = JOBS[what](MPI.COMM_WORLD)
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        Path(file).write_text(json.dumps({**figures, "began": began, "ended": time.time()}))
    MPI.COMM_WORLD.Barrier()
    if what in ENDS_BADLY and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size // 2:
        raise ValueError("a mistake on one rank")
    if what in ENDS_BADLY:
        MPI.COMM_WORLD.Barrier()  # the others wait until the job ends


def memory(world: Any) -> dict[str, float]:
    """Return the megabytes of a rank that are its own, and those with its share of shared ones; means over ranks."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1000 * 1.024 for line in lines}
    own = sizes["Private_Clean"] + sizes["Private_Dirty"]
    found = world.allgather((own, sizes["Pss"]))
    return {"USS": statistics.mean(own for own, _ in found), "PSS": statistics.mean(pss for _, pss in found)}


class Model:
    """A model that consists only of gradients: four megabytes in ten arrays."""

    def __init__(self) -> None:
        self.params = [Param(100_000) for _ in range(10)]

    def namedparams(self) -> list[tuple[str, Any]]:
        """Return the names and parameters."""
        return [(f"/{i}", param) for i, param in enumerate(self.params)]


class Param:
    """A minimal parameter for mn_comm."""

    def __init__(self, length: int) -> None:
        self.data = np.zeros(length, np.float32)
        self.grad = np.ones(length, np.float32)


def names_of_strategies() -> list[str]:
    """Return the strategies that average in host memory across nodes."""
    from mn_comm.building_blocks import STRATEGIES

    return [name for name, kind in STRATEGIES.items() if kind.on_host and kind.communicates and not kind.one_node]


def averages(world: Any) -> dict[str, Any]:
    """Create a communicator of each strategy and average with it; return seconds, and memory after each."""
    found: dict[str, Any] = {"memory": {"MPI alone": memory(world)}, "seconds": {}}
    from common import timed

    import mn_comm

    model, made = Model(), []
    for name in names_of_strategies():
        comms: list[Any] = []
        found["seconds"][f"create {name}"] = timed(lambda: comms.append(mn_comm.create_communicator(name)))  # noqa: B023 - called at once
        if not made:
            found["memory"]["a communicator"] = memory(world)
        comm = comms[0]
        found["seconds"][f"first average, {name}"] = timed(lambda: comm.multi_node_mean_grad(model))  # noqa: B023
        again = [timed(lambda: comm.multi_node_mean_grad(model)) for _ in range(3)]  # noqa: B023
        found["seconds"][f"average, {name}"] = statistics.median(again)
        assert model.params[0].grad[0] == 1
        made.append(comm)
    found["memory"]["all strategies, and 8 MB of gradients and parameters"] = memory(world)
    return found


def collectives(world: Any) -> dict[str, Any]:
    """Time each collective of ours beside MPI's; in turn, so that other load affects both equally."""
    from common import interleave

    import mn_comm

    pairs = pairs_of(world, mn_comm.create_communicator("flat"))
    contestants = {
        f"{name}, {whose}": call for name, pair in pairs.items() for whose, call in zip(WHOSE, pair, strict=True)
    }
    medians = interleave(contestants, ROUNDS)
    return {"seconds": {}, "pairs": {name: [medians[f"{name}, {whose}"] for whose in WHOSE] for name in pairs}}


def pairs_of(world: Any, comm: Any) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return our collectives and MPI's, by name."""
    from mpi4py import MPI

    x, y = np.ones(LENGTH, np.float32), np.empty(LENGTH, np.float32)
    per_rank = np.ones((world.size, 16), np.float32)
    room, part = np.empty_like(per_rank), np.empty(16, np.float32)
    blocks = tuple(per_rank)
    root = world.rank == 0
    thing = {"rank": world.rank, "values": list(range(20))}
    things = [thing] * world.size if root else None
    return {
        "barrier": (comm.barrier, world.Barrier),
        "bcast": (lambda: comm.bcast(x), lambda: world.Bcast(x)),
        "allreduce": (lambda: comm.allreduce(x), lambda: world.Allreduce(x, y)),
        "reduce": (lambda: comm.reduce(x), lambda: world.Reduce(x, y)),
        "reduce_scatter": (
            lambda: comm.reduce_scatter(per_rank),
            lambda: world.Reduce_scatter_block(per_rank, part),
        ),
        "gather": (lambda: comm.gather(part), lambda: world.Gather(part, room if root else None)),
        "allgather": (lambda: comm.allgather(part), lambda: world.Allgather(part, room)),
        "scatter": (
            lambda: comm.scatter(blocks if root else None),
            lambda: world.Scatter(per_rank if root else None, part),
        ),
        "alltoall": (lambda: comm.alltoall(blocks), lambda: world.Alltoall(per_rank, room)),
        "bcast_obj": (lambda: comm.bcast_obj(thing), lambda: world.bcast(thing)),
        "gather_obj": (lambda: comm.gather_obj(thing), lambda: world.gather(thing)),
        "allgather_obj": (lambda: comm.allgather_obj(thing), lambda: world.allgather(thing)),
        "scatter_obj": (lambda: comm.scatter_obj(things), lambda: world.scatter(things)),
        "allreduce_obj": (lambda: comm.allreduce_obj(1.5), lambda: world.allreduce(1.5, MPI.SUM)),
    }


def objects(world: Any) -> dict[str, Any]:
    """Return the bytes of Python's objects, NumPy's arrays included, that are there after each step on a rank."""
    import mn_comm

    comm = mn_comm.create_communicator("naive", world.Dup())  # everything is imported
    comm.multi_node_mean_grad(Model())
    call_all(world, comm)
    gc.collect()
    tracemalloc.start(8)
    before = tracemalloc.take_snapshot() if world.rank == 0 else None
    model, found, kept, steps = Model(), {}, [], []
    for name in names_of_strategies():
        steps.append(
            (f"{name}: created", lambda name=name: kept.append(mn_comm.create_communicator(name, world.Dup())))
        )
        steps.append((f"{name}: averages", lambda: kept[-1].multi_node_mean_grad(model)))
    steps.append(("collectives", lambda: call_all(world, kept[-1])))
    steps.append(("three splits", lambda: [kept[-1].split(world.rank // n, world.rank) for n in (2, 3, 4)]))
    last = tracemalloc.get_traced_memory()[0]
    for name, step in steps:
        step()
        gc.collect()
        now = tracemalloc.get_traced_memory()[0]
        found[name], last = now - last, now
    if before is not None and os.environ.get("MN_BENCH_TOP"):
        for line in tracemalloc.take_snapshot().compare_to(before, "lineno")[:25]:
            print(line, file=sys.stderr)
    most = {name: max(each) for name, each in ((name, world.allgather(found[name])) for name in found)}
    tracemalloc.stop()
    return {"seconds": {}, "objects": most}


def call_all(world: Any, comm: Any) -> None:
    """Call each of our collectives once."""
    for ours, _ in pairs_of(world, comm).values():
        ours()


def with_chainer(world: Any) -> dict[str, Any]:
    """Train, scatter, evaluate and save checkpoints; return seconds and memory."""
    seconds: dict[str, float] = {}
    begin = time.perf_counter()
    import chainer
    import chainer.links as L
    import chainermn
    from common import timed

    world.Barrier()
    seconds["import of chainermn"] = time.perf_counter() - begin
    found = {"memory": {"Chainer": memory(world)}, "seconds": seconds}
    comm = chainermn.create_communicator("two_dimensional")
    found["memory"]["Chainer and a communicator"] = memory(world)
    data: Any = None
    if comm.rank == 0:
        random = np.random.RandomState(0)
        data = chainer.datasets.TupleDataset(
            random.rand(32 * comm.size, 16).astype("f4"), random.randint(0, 4, 32 * comm.size).astype("i4")
        )
    parts: list[Any] = []
    seconds["scatter_dataset"] = timed(
        lambda: parts.append(chainermn.scatter_dataset(data, comm, shuffle=True, seed=0))
    )
    model = L.Classifier(L.Linear(16, 4))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(model)
    folder = Path(comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None))
    updater = chainer.training.StandardUpdater(chainer.iterators.SerialIterator(parts[0], 16), optimizer)
    trainer = chainer.training.Trainer(updater, (2, "epoch"), out=str(folder))
    tested = chainer.iterators.SerialIterator(parts[0], 16, repeat=False, shuffle=False)
    evaluator = chainermn.create_multi_node_evaluator(chainer.training.extensions.Evaluator(tested, model), comm)
    checkpointer = chainermn.create_multi_node_checkpointer("many", comm, path=str(folder))
    for _ in range(2):  # the first distributes the parameters
        updater.update()
    seconds["update"] = timed(updater.update)
    seconds["evaluator"] = timed(lambda: evaluator(trainer))
    trainer._start_at = time.time()  # noqa: SLF001 - as its run() does
    seconds["checkpoint"] = timed(lambda: checkpointer(trainer))
    seconds["resume"] = timed(lambda: checkpointer.maybe_load(trainer))
    checkpointer.finalize()
    found["memory"]["Chainer, after training"] = memory(world)
    world.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)
    return found


def stall(world: Any) -> dict[str, Any]:
    """Let all ranks wait for one until they have said so."""
    from common import timed

    import mn_comm

    comm = mn_comm.create_communicator("flat")
    seconds = timed(lambda: (time.sleep(8) if comm.rank == 1 else None, comm.barrier()))
    return {"seconds": {"a barrier with one rank 8 s late": seconds}}


def abort(world: Any) -> dict[str, Any]:
    """Create a communicator; afterwards, one rank raises an exception."""
    import mn_comm

    mn_comm.create_communicator("flat")
    return {"seconds": {}}


JOBS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "averages": averages,
    "collectives": collectives,
    "objects": objects,
    "chainer": with_chainer,
    "stall": stall,
    "abort": abort,
}


def as_text(lines: Sequence[dict[str, Any]]) -> str:
    """Return the tables."""
    text = ["# Many ranks on one machine\n", "Written by `benchmarks/scaling.py --many`; far more ranks than cores.\n"]
    for mpi in dict.fromkeys(line["mpi"] for line in lines):
        mine = [line for line in lines if line["mpi"] == mpi]
        sizes = sorted({line["ranks"] for line in mine})
        for title, table in sections(mine, sizes).items():
            if table:
                text += [f"### {title}, {mpi}\n", *table, ""]
    return "\n".join(text)


def sections(lines: Sequence[dict[str, Any]], sizes: Sequence[int]) -> dict[str, list[str]]:
    """Return the rows of each table."""
    of = {field: values_of(lines, field) for field in ("memory", "objects", "pairs", "seconds")}
    return {
        "Megabytes of a rank: private, and with its share of shared memory": rows(
            "after", of["memory"], sizes, lambda sizes_: f"{sizes_['USS']:.1f}, {sizes_['PSS']:.1f}"
        ),
        "Bytes of the objects of a rank": rows(
            "step", of["objects"], sizes, lambda nbytes: f"{nbytes:,}", "bytes for each more rank", slope
        ),
        "Milliseconds of collectives: ours, and those of MPI": rows(
            "collective",
            of["pairs"],
            sizes,
            lambda pair: ", ".join(f"{1e3 * each:.1f}" for each in pair),
            "exponents",
            exponents,
        ),
        "Seconds": rows(
            "what",
            of["seconds"],
            sizes,
            lambda seconds: f"{seconds:.2f}",
            "exponent",
            lambda all_: f"{exponent(all_):.2f}",
        ),
    }


def values_of(lines: Sequence[dict[str, Any]], field: str) -> dict[str, dict[int, Any]]:
    """Return what was measured, by name and number of ranks."""
    found: dict[str, dict[int, Any]] = {}
    for line in lines:
        prefix = f"{line['job']}: " if field == "seconds" else ""
        for name, value in line.get(field, {}).items():
            found.setdefault(prefix + name, {})[line["ranks"]] = value
    return found


def rows(
    first: str,
    values: Mapping[str, Mapping[int, Any]],
    sizes: Sequence[int],
    cell: Callable[[Any], str],
    last: str = "",
    conclude: Callable[[Mapping[int, Any]], str] = lambda by_size: "",
) -> list[str]:
    """Return the rows of a table; none if there are no values.

    Args:
        first: The title of the names.
        values: What was measured, by name and number of ranks.
        sizes: The numbers of ranks.
        cell: Returns the text for a value.
        last: The title of one more column, if there is one.
        conclude: Returns its text for the values of a name.
    """
    if not values:
        return []
    lines = [[first, *(f"{n} ranks" for n in sizes), *([last] if last else [])]]
    for name, by_size in values.items():
        cells = [cell(by_size[n]) if n in by_size else "" for n in sizes]
        lines.append([name, *cells, *([conclude(by_size)] if last else [])])
    head, *others = (f"| {' | '.join(line)} |" for line in lines)
    return [head, "|---" * len(lines[0]) + "|", *others]


def slope(by_size: Mapping[int, float]) -> str:
    """Return how much a number grows with each rank."""
    first, last = min(by_size), max(by_size)
    return f"{(by_size[last] - by_size[first]) / max(1, last - first):.1f}"


def exponents(by_size: Mapping[int, Sequence[float]]) -> str:
    """Return the exponents of ours, and of MPI's."""
    return ", ".join(f"{exponent({n: pair[which] for n, pair in by_size.items()}):.2f}" for which in range(len(WHOSE)))


def exponent(by_size: Mapping[int, float]) -> float:
    """Return the exponent e of a fit of seconds to c * ranks ** e."""
    if len(by_size) < 2:
        return math.nan
    logs = np.log([[n, max(s, 1e-9)] for n, s in by_size.items()])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])
