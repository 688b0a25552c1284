"""A scaling study: a model of the cost of averaging, fitted and checked here, and drawn for more workers.

    python benchmarks/scaling.py

It starts jobs with MPICH's mpiexec on this machine and, if possible, on several hosts that tools/cluster.py creates on
it. It fits the parameters of the model in cost.py to some of the measured points, predicts the others, and writes into
benchmarks/results/:

    scaling.jsonl            every measured point
    scaling.md               parameters, predictions and errors, as tables
    scaling-model.png        what was measured against what the model says
    scaling-efficiency.png   what the model says of training ResNet-50 on up to 1,024 GPUs, with published results

``--many 16,64,256`` measures, instead, that many ranks on this machine, and writes scaling-many.jsonl and
scaling-many.md; see scaling_many.py.

``--draw`` fits and draws the measured points again; ``--quick`` measures only a few, and its results are not reliable.
The seconds of a point are the median of some rounds; of several such medians, from jobs that took turns, the smallest
counts, because other load on the machine makes it slower, never faster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cost import Machine, Point
from scaling_many import JOBS, many
from scaling_many import run as run_many

HERE = Path(__file__).resolve().parent
CLUSTER = HERE.parent / "tools" / "cluster.py"
NO_CLUSTER = 77
RATE = "1gbit"
RESNET50 = "resnet50"

# Megabytes and number of arrays.
FITTED_SHAPES: list[tuple[float, int]] = [(0.25, 4), (1, 1), (1, 16), (4, 64), (4, 1), (16, 4), (16, 64), (64, 16)]
OTHER_SHAPES: list[tuple[float, int] | str] = [(2, 8), (8, 4), (32, 32), RESNET50]
FITTED_WIRE: list[tuple[float, int]] = [(1 / 1024, 1), (1, 1), (1, 16), (4, 16), (16, 1), (32, 8)]
OTHER_WIRE: list[tuple[float, int]] = [(2, 8), (6, 6), (24, 16)]
ONE_NODE, NODES = ("naive", "flat", "two_dimensional"), ("naive", "flat", "hierarchical", "two_dimensional")
# Processes on each host: strategies, shapes to fit, shapes to predict.
PLAN: dict[tuple[int, ...], tuple[Sequence[str], Sequence, Sequence]] = {
    (1,): (ONE_NODE, FITTED_SHAPES, OTHER_SHAPES),
    (2,): (ONE_NODE, FITTED_SHAPES, OTHER_SHAPES),
    (3,): (ONE_NODE, [], OTHER_SHAPES),
    (4,): (ONE_NODE, FITTED_SHAPES, OTHER_SHAPES),
    (1, 1): (NODES, FITTED_WIRE, OTHER_WIRE),
    (1, 1, 1): (NODES, FITTED_WIRE, OTHER_WIRE),
    (2, 1): (NODES, FITTED_WIRE, OTHER_WIRE),
    (2, 2): (NODES, [], OTHER_WIRE),
    (1, 1, 1, 1): (NODES, [], OTHER_WIRE),
}
QUICK = {
    (1,): (ONE_NODE, [(0.25, 4), (1, 1)], []),
    (2,): (ONE_NODE, [(0.25, 4), (1, 1), (1, 16)], [(0.5, 2)]),
    (1, 1): (("flat", "two_dimensional"), [(0.25, 4)], [(0.5, 2)]),
}


def main() -> int:
    """Measure, unless only drawing was requested; fit; write the tables and charts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder for the results")
    parser.add_argument("--passes", type=int, default=3, help="how often each job is run")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each job")
    parser.add_argument("--quick", action="store_true", help="a few points, to see that it works")
    parser.add_argument("--draw", action="store_true", help="use the points that were measured before")
    parser.add_argument("--many", help="numbers of ranks on this machine, for example 16,64,256")
    parser.add_argument("--jobs", default=",".join(JOBS), help="which jobs to run with --many; default: all")
    parser.add_argument("--most-with-chainer", type=int, default=128, help="the most ranks that import Chainer")
    parser.add_argument("--limit", type=float, default=400, help="the seconds after which a job of --many has hung")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--many-job", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.many_job:
        run_many(*args.many_job)
        return 0
    if args.job:
        from scaling_job import run

        run(**json.loads(args.job))
        return 0
    from scaling_report import report

    args.out.mkdir(parents=True, exist_ok=True)
    if args.many is not None:
        sizes = [int(n) for n in args.many.split(",") if n]
        many(sizes, args.jobs.split(","), args.out, most_with_chainer=args.most_with_chainer, limit=args.limit)
        return 0
    figures = args.out / "scaling.jsonl"
    if not args.draw:
        plan = QUICK if args.quick else PLAN
        lines = measure(plan, 1 if args.quick else args.passes, 2 if args.quick else args.rounds)
        figures.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report([json.loads(line) for line in figures.read_text().splitlines()], args.out)
    return 0


def measure(plan: dict, passes: int, rounds: int) -> list[dict]:
    """Return every point of a plan, with the smallest of its medians, in the form in which it is saved."""
    found: dict[str, dict] = {}
    for number in range(passes):
        for hosts, (strategies, fitted, others) in plan.items():
            print(f"pass {number + 1} of {passes}, processes on each host: {hosts}", flush=True)
            shapes = [[shape, True] for shape in fitted] + [[shape, False] for shape in others]
            for line in run_job(hosts, strategies=strategies, shapes=shapes, rounds=rounds):
                key = json.dumps([line["strategy"], line["hosts"], line["shape"]])
                kept = found.setdefault(key, line)
                kept["seconds"] = min(kept["seconds"], line["seconds"])
    return [machine_line(), *found.values()]


def run_job(hosts: tuple[int, ...], **options: object) -> list[dict]:
    """Measure on some processes of each host; return nothing if there can be no such hosts."""
    command = [sys.executable, str(HERE / "scaling.py"), "--job", json.dumps({"hosts": hosts, **options})]
    if len(hosts) == 1:
        mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
        launcher = [mpiexec, "-n", str(hosts[0])]
    else:
        launcher = [sys.executable, str(CLUSTER), "--hosts", ",".join(map(str, hosts)), "--rate", RATE, "--"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *command], env=environ, capture_output=True, text=True, timeout=1200)
    if done.returncode == NO_CLUSTER:
        print(f"left out: {done.stderr.strip()}")
        return []
    if done.returncode:
        raise RuntimeError(f"the job on {hosts} failed with status {done.returncode}\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def machine_line() -> dict:
    """Return the first line of the file: the machine."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [each.read_text().strip() for each in sorted(caches.glob("index*/size"))]
    units = {"K": 2**10, "M": 2**20}
    last = max((int(size[:-1]) * units[size[-1]] for size in sizes), default=2**25)
    cores = len(os.sched_getaffinity(0))
    return {"machine": {"cores": cores, "cache_bytes": last}, "rate": RATE}


def as_point(line: dict) -> Point:
    """Return the point that a line describes."""
    return Point(line["strategy"], tuple(line["hosts"]), line["nbytes"], line["arrays"])


def as_machine(line: dict) -> Machine:
    """Return the machine that the first line describes."""
    return Machine(**line["machine"])


if __name__ == "__main__":
    sys.exit(main())
