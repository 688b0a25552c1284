"""How long training is interrupted when a rank ends, compared with a restart of the same script.

    python benchmarks/recovery.py [--ranks 3] [--jobs 15] [--restarts 3] [--ends SIGKILL,exit] [--json figures.jsonl]

Open MPI's ``mpiexec`` must be in the same folder as this Python. Each job trains a network of a megabyte. One of its
ranks ends at a random moment: by a signal, by an uncaught exception, or by ``sys.exit(3)`` (``exit``). The benchmark
measures the time from that moment until all other ranks have completed a step without it. In between, the same script
runs without ``elastic=True`` and one of its ranks is killed. The job ends and is started again at once, and the
benchmark measures the time from the kill until the first step is complete.
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
from typing import NoReturn

import numpy as np

UNITS = 500  # of both layers: 250,000 parameters in float32 are a megabyte
STEPS = 60
PATIENCE_SECONDS = 60
ENDS = ("SIGKILL", "SIGSEGV", "SIGTERM", "exception", "exit")


def main() -> None:
    """Run the requested jobs, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=15, help="how many ranks end in each way, each in a job of its own")
    parser.add_argument("--ends", default=",".join(ENDS), help="how ranks end: some of %(default)s")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--strategy", default="two_dimensional")
    parser.add_argument("--json", default="", help="a file to add the figures to, as a line of JSON")
    parser.add_argument("--train", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--end", default="SIGKILL", help=argparse.SUPPRESS)
    parser.add_argument("--elastic", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(Path(args.train), args)
        return
    ends = args.ends.split(",")
    if unknown := set(ends) - set(ENDS):
        parser.error(f"expected some of {', '.join(ENDS)} for --ends, got {', '.join(sorted(unknown))}")
    found: dict[str, list[float]] = {**{end: [] for end in ends}, "restart": []}
    every = max(1, args.jobs // max(1, args.restarts))
    for seed in range(args.jobs):
        for end in ends:
            found[end].append(recovery(args, seed, end))
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


def recovery(args: argparse.Namespace, seed: int, end: str) -> float:
    """Return the seconds from the end of a rank until all other ranks have completed a step without it."""
    notes = finished(args, seed, "--elastic", "--seed", str(seed), "--end", end)
    (ended,) = (note["time"] for note in notes if note["what"] == "ended")
    later = [note for note in notes if note["what"] == "step" and note["generation"] == 1]
    return (
        max(min(note["time"] for note in later if note["rank"] == rank) for rank in {n["rank"] for n in later}) - ended
    )


def restart(args: argparse.Namespace, seed: int) -> float:
    """Return the seconds from a kill until a job that was started again has completed a step."""
    (ended,) = (note["time"] for note in finished(args, seed, "--seed", str(seed)) if note["what"] == "ended")
    return min(note["time"] for note in finished(args, seed) if note["what"] == "step") - ended


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
    """Train on one rank, and note when steps were complete, and when it ended."""
    import chainer
    import chainermn

    comm = chainermn.create_communicator(args.strategy, elastic=args.elastic)
    rank, plan = comm.rank, np.random.RandomState(max(0, args.seed))
    victim, step_of_death, seconds = plan.randint(comm.size), plan.randint(10, 30), plan.exponential(0.005)
    file = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, **more: object) -> None:
        line = {"rank": rank, "what": what, "time": time.monotonic(), **more}
        os.write(file, (json.dumps(line) + "\n").encode())

    def end_by_signal() -> None:
        time.sleep(seconds)
        note("ended")
        os.kill(os.getpid(), getattr(signal, args.end))

    model = chainer.links.Classifier(chainer.links.Linear(UNITS, UNITS))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(), comm).setup(model)
    x, t = np.ones((8, UNITS), np.float32), np.zeros(8, np.int32)
    for step in range(STEPS):
        if args.seed >= 0 and rank == victim and step == step_of_death:
            if args.end.startswith("SIG"):
                threading.Thread(target=end_by_signal, daemon=True).start()
            else:
                note("ended")
                end_by_itself(args.end)
        optimizer.update(model, x, t)
        note("step", step=step, generation=comm.generation if args.elastic else 0)
        if args.seed < 0:  # after a restart, only the first step is needed
            break
    if args.seed >= 0 and rank == victim:
        threading.Event().wait(1)  # for its death


def end_by_itself(how: str) -> NoReturn:
    """End this rank from within."""
    if how == "exit":
        sys.exit(3)
    raise RuntimeError("this rank fails")


if __name__ == "__main__":
    main()
