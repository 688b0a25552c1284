"""How long it takes until a spare has replaced a rank that was killed.

    python benchmarks/spares.py [--ranks 3] [--megabytes 1,100] [--jobs 5] [--json figures.jsonl]

Open MPI's ``mpiexec`` must be in the same folder as this Python. Each job trains a network with momentum, which has as
many parameters again, and has one spare. One of its ranks is killed between two steps. The benchmark measures the time
from the kill until the other ranks have completed a step, and until all ranks, the spare included, have completed one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UNITS = 500  # of both layers, for a megabyte: 250,000 parameters in float32
STEP_OF_DEATH = 6
STEPS_AFTERWARDS = 3
PATIENCE_SECONDS = 120

Note = dict[str, float]


def main() -> None:
    """Run the requested jobs, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3, help="the ranks that train; default %(default)s")
    parser.add_argument("--megabytes", default="1,100", help="the sizes of the networks; default %(default)s")
    parser.add_argument("--jobs", type=int, default=5, help="how many for each size; default %(default)s")
    parser.add_argument("--json", default="", help="a file to add the figures to, as lines of JSON")
    parser.add_argument("--train", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(Path(args.train), int(args.megabytes))
        return
    sizes = [int(size) for size in args.megabytes.split(",")]
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for number in range(args.jobs):
        for size in sizes:
            found[size].append(replacement(args.ranks, size, victim=number % args.ranks))
    report(args, found)


def report(args: argparse.Namespace, found: dict[int, list[tuple[float, float]]]) -> None:
    """Print medians, and save all figures."""
    for size, pairs in found.items():
        for name, seconds in zip(("a step without it", "a step with a spare"), zip(*pairs, strict=True), strict=True):
            median, most = 1000 * statistics.median(seconds), 1000 * max(seconds)
            print(f"{size:5} MB  {name:20} {len(seconds)} times: median {median:7.1f} ms, at most {most:7.1f} ms")
        if args.json:
            with Path(args.json).open("a") as file:
                line = {"benchmark": "spares", "ranks": args.ranks, "megabytes": size, "seconds": pairs}
                file.write(json.dumps(line) + "\n")


def replacement(ranks: int, megabytes: int, victim: int) -> tuple[float, float]:
    """Return the seconds from the kill of a rank until a step without it, and until a step with a spare, are complete.

    Raises:
        RuntimeError: The job failed.
    """
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    environ = {
        **os.environ,
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
        "CHAINERMN_SPARES": "1",
        "VICTIM": str(victim),
    }
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, __file__, "--train", folder, "--megabytes", str(megabytes)]
        command = [mpiexec, "--with-ft", "ulfm", "-n", str(ranks + 1), *script]
        job = subprocess.run(command, env=environ, timeout=PATIENCE_SECONDS, capture_output=True, text=True)
        if job.returncode:
            raise RuntimeError(f"the job ended with status {job.returncode}\n{job.stdout}{job.stderr}")
        notes = [json.loads(line) for file in Path(folder).glob("rank-*") for line in file.read_text().splitlines()]
    (killed,) = (note["time"] for note in notes if note["killed"])
    later = [note for note in notes if note["generation"] > 1]
    return completed(later, ranks - 1) - killed, completed(later, ranks) - killed


def completed(notes: list[Note], size: int) -> float:
    """Return when as many ranks had completed their first step together."""
    steps: dict[float, list[float]] = {}
    for note in notes:
        if note["size"] == size:
            steps.setdefault(note["step"], []).append(note["time"])
    return min(max(times) for times in steps.values() if len(times) == size)


def train(folder: Path, megabytes: int) -> None:
    """Train on one rank, and note when steps were complete, and when it was killed."""
    import chainer
    import chainermn
    import numpy as np

    comm = chainermn.create_communicator("two_dimensional", elastic=True)
    units = int(UNITS * megabytes**0.5)
    model = chainer.links.Classifier(chainer.links.Linear(units, units))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(), comm).setup(model)
    data = chainer.datasets.TupleDataset(np.ones((64, units), np.float32), np.zeros(64, np.int32))
    iterator = chainermn.iterators.ElasticIterator(data, 2, comm, seed=0)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    file = os.open(folder / f"rank-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*, killed: bool = False) -> None:
        line = {"step": updater.iteration, "time": time.monotonic(), "killed": killed}
        os.write(file, (json.dumps({**line, "generation": comm.generation, "size": comm.size}) + "\n").encode())

    def has_ended(trainer: chainer.training.Trainer) -> bool:
        return updater.iteration > STEP_OF_DEATH + STEPS_AFTERWARDS and comm.size == full

    trainer = chainer.training.Trainer(updater, has_ended, out=str(folder / "result"))
    keeper = chainermn.extensions.create_memory_keeper(comm)

    @trainer.extend  # type: ignore[untyped-decorator]
    @chainer.training.make_extension(trigger=(1, "iteration"))  # type: ignore[untyped-decorator]
    def note_step(trainer: chainer.training.Trainer) -> None:
        if updater.iteration == STEP_OF_DEATH and comm.rank == victim:
            note(killed=True)
            os.kill(os.getpid(), signal.SIGKILL)
        note()

    keeper.maybe_load(trainer)  # afterwards, the communicator contains the ranks that train
    full, victim = comm.size, int(os.environ["VICTIM"]) if comm.generation == 1 else None
    trainer.run()


if __name__ == "__main__":
    main()
