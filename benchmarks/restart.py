"""How long a restart interrupts a training that continues from the memory of its node, or from files on a disk.

    python benchmarks/restart.py [--sizes 1,100,1000] [--rounds 3] [--json figures.jsonl]

``mpiexec`` must be in the same folder as this Python. ``chainermn elastic`` runs each job. Once the state is saved, one
rank is killed, and the job is restarted. The benchmark measures the time from the kill until all ranks have completed a
step. One half of the state is that of a linear layer, and the other half is its momentum. The contestants run in turn:

``memory``
    ``create_memory_keeper``.
``disk, cached``
    ``create_multi_node_checkpointer``; the files are still in the page cache.
``disk``
    The same, but the files are no longer in the page cache, as on another host.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("memory", "disk, cached", "disk")
KEPT_AT = 3  # the step after which the state is saved, and a rank is killed
BATCH = 4
PATIENCE_SECONDS = 300
MOST_OF_MEMORY = 9  # how much a job uses, in states: those of two ranks, gradients, copies of the keeper and of files


def main() -> None:
    """Run the requested jobs, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,100,1000", help="the sizes of the state, in MB; default %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", help="where checkpoints are written; default: the folder of temporary files")
    parser.add_argument("--json", default="", help="a file to add the figures to, as lines of JSON")
    parser.add_argument("--train", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(Path(args.train), args.way, int(args.sizes))
        return
    for megabytes in map(int, args.sizes.split(",")):
        check_memory(megabytes)
        found: dict[str, dict[str, list[float]]] = {way: {"restart": [], "keep": [], "load": []} for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                for name, seconds in run(args, way, megabytes).items():
                    found[way][name].append(seconds)
        report(args, megabytes, found)


def check_memory(megabytes: int) -> None:
    """Exit if a state does not fit into memory."""
    available = int(re.findall(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)[0]) / 1000
    if available < MOST_OF_MEMORY * megabytes:
        sys.exit(
            f"expected {MOST_OF_MEMORY * megabytes} MB of memory for a state of {megabytes} MB, got {available:.0f}"
        )


def report(args: argparse.Namespace, megabytes: int, found: dict[str, dict[str, list[float]]]) -> None:
    """Print medians, and save all figures if requested."""
    library = mpi()
    print(f"\n{library}, {args.ranks} ranks, a state of {megabytes} MB, {args.rounds} times")
    print(f"{'':16}{'restart, s':>12}{'longest, s':>12}{'of which load, s':>18}{'keep, s':>10}")
    for way, seconds in found.items():
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        line = f"{medians['restart']:12.2f}{max(seconds['restart']):12.2f}"
        print(f"{way:16}{line}{medians['load']:18.3f}{medians['keep']:10.3f}", flush=True)
    if args.json:
        figures = {"ranks": args.ranks, "benchmark": "restart", "mpi": library, "megabytes": megabytes}
        with Path(args.json).open("a") as file:
            file.write(json.dumps({**figures, "seconds": found}) + "\n")


def mpi() -> str:
    """Return the name of the MPI library beside this Python."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=True).stdout
    return "MPICH" if "HYDRA" in version else "Open MPI"


def run(args: argparse.Namespace, way: str, megabytes: int) -> dict[str, float]:
    """Run a job; return the seconds from the kill to a step of all ranks, and those for saving and for loading."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environ = {**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        script = [__file__, "--train", folder, "--way", way, "--sizes", str(megabytes)]
        job = subprocess.run(
            [sys.executable, "-m", "chainermn", "elastic", "-n", str(args.ranks), *script],
            env={**environ, "PATH": path},
            timeout=PATIENCE_SECONDS,
            capture_output=True,
            text=True,
        )
        notes = [json.loads(line) for file in Path(folder).glob("notes-*") for line in file.read_text().splitlines()]
    if job.returncode or not any(note["what"] == "step" for note in notes):
        sys.exit(f"{way}, {megabytes} MB: expected a training that comes to its end, got {job.stderr}")
    times = {what: [note["value"] for note in notes if note["what"] == what] for what in {n["what"] for n in notes}}
    return {
        "restart": max(times["step"]) - max(times["killed"]),
        "keep": max(times["keep"]),
        "load": max(times["load"]),
    }


def train(folder: Path, way: str, megabytes: int) -> None:
    """Train on one rank: save the state, be killed, and continue for one step."""
    import chainer
    import chainermn
    import numpy as np

    attempt = int(os.environ["CHAINERMN_SUPERVISOR"].split()[-1])
    comm = chainermn.create_communicator("two_dimensional")
    file = os.open(folder / f"notes-{attempt}-{comm.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, value: float) -> None:
        os.write(file, (json.dumps({"what": what, "value": value}) + "\n").encode())

    units = round((megabytes * 1e6 / 8) ** 0.5)  # parameters and momentum in float32
    model = chainer.links.Classifier(chainer.links.Linear(units, units, initialW=0))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(), comm).setup(model)
    data = chainer.datasets.TupleDataset(np.ones((BATCH * 64, units), "f"), np.zeros(BATCH * 64, "i"))
    iterator = chainermn.iterators.ElasticIterator(data, BATCH, comm, seed=0)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (KEPT_AT + 1, "iteration"), out=str(folder / "result"))
    kept = keeper_of(comm, way, folder)
    began = time.monotonic()
    resumed = kept.maybe_load(trainer, optimizer)
    if attempt > 1:
        note("load", time.monotonic() - began)
        assert resumed == KEPT_AT, resumed

    @trainer.extend  # type: ignore[untyped-decorator]
    @chainer.training.make_extension(trigger=(1, "iteration"))  # type: ignore[untyped-decorator]
    def keep_and_die(trainer: Any) -> None:
        if attempt > 1:
            note("step", time.monotonic())
            return
        if trainer.updater.iteration < KEPT_AT:
            return
        comm.barrier()
        began = time.monotonic()
        kept(trainer)
        note("keep", time.monotonic() - began)
        if way == "disk" and comm.rank == 0:
            forget(folder / "checkpoints")
        comm.barrier()
        if comm.rank == comm.size - 1:
            note("killed", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.run()


def keeper_of(comm: Any, way: str, folder: Path) -> Any:
    """Return the extension that saves the state: in memory, or in files."""
    import chainermn

    if way == "memory":
        return chainermn.extensions.create_memory_keeper(comm)
    return chainermn.create_multi_node_checkpointer("restart", comm, path=str(folder / "checkpoints"))


def forget(folder: Path) -> None:
    """Make the kernel drop files, which are already on disk, from its page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
