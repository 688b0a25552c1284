"""How long training is interrupted when a rank is killed, compared with a restart of the same script.

    python benchmarks/recovery.py [--ranks 3] [--jobs 15] [--restarts 3] [--json figures.jsonl]

Open MPI's ``mpiexec`` must be in the same folder as this Python. Each job trains a network of a megabyte, and one of
its ranks is killed at a random moment. The result is the time from the kill until all other ranks have completed a step
without it. In between, the same script is run without ``elastic=True``: it ends and is restarted immediately, and the
result is the time from the kill until its first step is complete.
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
import threading
import time
from pathlib import Path

import numpy as np

UNITS = 500  # of both layers: 250,000 parameters in float32 are a megabyte
STEPS = 60
PATIENCE_SECONDS = 60


def main() -> None:
    """Run the requested jobs, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=15, help="how many ranks are killed, each in a job of its own")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--strategy", default="two_dimensional")
    parser.add_argument("--json", default="", help="a file to add the figures to, as a line of JSON")
    parser.add_argument("--train", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--elastic", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(Path(args.train), args)
        return
    found: dict[str, list[float]] = {"recovery": [], "restart": []}
    every = max(1, args.jobs // max(1, args.restarts))
    for seed in range(args.jobs):
        found["recovery"].append(recovery(args, seed))
        if seed % every == 0 and len(found["restart"]) < args.restarts:
            found["restart"].append(restart(args, seed))
    report(args, found)


def report(args: argparse.Namespace, found: dict[str, list[float]]) -> None:
    """Print medians, and save all figures."""
    for name, seconds in found.items():
        if seconds:
            median, most = 1000 * statistics.median(seconds), 1000 * max(seconds)
            print(f"{name:10} {len(seconds):3} times: median {median:8.1f} ms, at most {most:8.1f} ms")
    if args.json:
        with Path(args.json).open("a") as file:
            file.write(json.dumps({"ranks": args.ranks, "benchmark": "recovery", "seconds": found}) + "\n")


def recovery(args: argparse.Namespace, seed: int) -> float:
    """Return the seconds from a kill until all remaining ranks have completed a step without the killed one."""
    notes = finished(args, seed, "--elastic", "--seed", str(seed))
    (killed,) = (note["time"] for note in notes if note["what"] == "killed")
    later = [note for note in notes if note["what"] == "step" and note["generation"] == 1]
    return (
        max(min(note["time"] for note in later if note["rank"] == rank) for rank in {n["rank"] for n in later}) - killed
    )


def restart(args: argparse.Namespace, seed: int) -> float:
    """Return the seconds from a kill until a restarted job has completed a step."""
    (killed,) = (note["time"] for note in finished(args, seed, "--seed", str(seed)) if note["what"] == "killed")
    return min(note["time"] for note in finished(args, seed) if note["what"] == "step") - killed


def finished(args: argparse.Namespace, seed: int, *more: str) -> list[dict[str, float | str]]:
    """Run a job until it ends in any way, and return the notes of its ranks."""
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    environ = {**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, __file__, "--train", folder, "--strategy", args.strategy, *more]
        fault_tolerance = ["--with-ft", "ulfm"] if "--elastic" in more else []
        command = [mpiexec, *fault_tolerance, "-n", str(args.ranks), *script]
        subprocess.run(command, env=environ, timeout=PATIENCE_SECONDS, capture_output=True)
        return [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]


def train(folder: Path, args: argparse.Namespace) -> None:
    """Train on one rank, and record when steps were complete, and when it was killed."""
    import chainer
    import chainermn

    comm = chainermn.create_communicator(args.strategy, elastic=args.elastic)
    rank, plan = comm.rank, np.random.RandomState(max(0, args.seed))
    victim, step_of_death, seconds = plan.randint(comm.size), plan.randint(10, 30), plan.exponential(0.005)
    file = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, **more: object) -> None:
        line = {"rank": rank, "what": what, "time": time.monotonic(), **more}
        os.write(file, (json.dumps(line) + "\n").encode())

    def die() -> None:
        time.sleep(seconds)
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)

    model = chainer.links.Classifier(chainer.links.Linear(UNITS, UNITS))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(), comm).setup(model)
    x, t = np.ones((8, UNITS), np.float32), np.zeros(8, np.int32)
    for step in range(STEPS):
        if args.seed >= 0 and rank == victim and step == step_of_death:
            threading.Thread(target=die, daemon=True).start()
        optimizer.update(model, x, t)
        note("step", step=step, generation=comm.generation if args.elastic else 0)
        if args.seed < 0:  # after a restart, only the first step is needed
            break
    if args.seed >= 0 and rank == victim:
        threading.Event().wait(1)  # for its death


if __name__ == "__main__":
    main()
