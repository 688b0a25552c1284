"""Whether `bench --model` recommends what is fastest: real training steps of every choice, beside its recommendation.

    python benchmarks/advice.py --json advice.jsonl            # all cases; as root, for the virtual hosts
    python benchmarks/advice.py --table advice.jsonl           # the table of what was measured
    mpiexec -n 2 python benchmarks/advice.py --job "one host, 2 ranks" --model mlp --compute 20ms

A case is a job, in which the recommendation is made first. Then `MultiNodeOptimizer` trains a model of Chainer with the
same arrays, whose functions only compute for the given time, with each choice of the menu in turn. The ratio compares
the step of the recommended choice with the step of the fastest one, both measured in this job.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common import WORLD, keep

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"mlp": "10ms", "transformer": "50ms", "resnet50": "100ms"}
PLACES = {
    "one host, 2 ranks": ["mpiexec", "-n", "2"],
    "one host, 4 ranks": ["mpiexec", "-n", "4"],
    **{
        f"two hosts, {name}": [sys.executable, "tools/cluster.py", "--hosts", "1,1", "--rate", rate, "--"]
        for name, rate in (("100 Mbit/s", "100mbit"), ("1 Gbit/s", "1gbit"), ("10 Gbit/s", "10gbit"))
    },
}
ROUNDS = 15
TURN_SECONDS = 0.2
# The local steps between two meetings are alike: these stand for more of them.
LOCAL_STEPS = 4
# A choice that is slower than this in its first turns is not measured again.
HOPELESS = 2.5
# One that is slower than this after two turns is not, either.
CLOSE = 1.35


class Trainee:
    """A model that is trained with one of the choices, and the time of its steps."""

    def __init__(self, choice: Any, comm: Any, replica: Any, work: Any) -> None:
        import chainer

        import mn_optim
        from mn_tools.bench.choices import SENDS

        options = {"send": SENDS[choice.send]} if choice.send else {}
        steps = [LOCAL_STEPS] if choice.steps else []
        when = getattr(mn_optim, choice.when)(*steps, **options)
        self.net = make_net(replica, work)
        self.optimizer = mn_optim.MultiNodeOptimizer(chainer.optimizers.SGD(1e-6), comm, when).setup(self.net)
        self.steps = choice.steps
        self.is_late = choice.when == "OneStepLate"
        self.together = 1
        self.seconds: list[float] = []
        self.optimizer.assume_synchronized()  # all parameters are zeros

    def turn(self, counts: bool = True) -> float:
        """Take steps, and return the seconds of one, on the slowest rank.

        Args:
            counts: Whether to keep the time.
        """
        if self.is_late:
            self.optimizer.update(self.net)
        WORLD.Barrier()
        mine = self.local_step() if self.steps else self.step()
        if self.is_late:
            self.optimizer._stepper.scheme.restart(self.net)  # noqa: SLF001 - the last averages must not disturb others
        slowest: float = WORLD.allreduce(mine, op=max)
        if counts:
            self.seconds.append(slowest)
        return slowest

    def step(self) -> float:
        """Return the seconds of a step, of several together."""
        begin = time.perf_counter()
        for _ in range(self.together):
            self.optimizer.update(self.net)
        return (time.perf_counter() - begin) / self.together

    def local_step(self) -> float:
        """Return the mean seconds of the steps up to a meeting, of which all but one are only local."""
        begin = time.perf_counter()
        for _ in range(LOCAL_STEPS - 1):
            self.optimizer.update(self.net)
        local = (time.perf_counter() - begin) / (LOCAL_STEPS - 1)
        begin = time.perf_counter()
        self.optimizer.update(self.net)
        return (local * (self.steps - 1) + time.perf_counter() - begin) / self.steps

    def begin(self, limit: float) -> float:
        """Create buckets, and learn the order of gradients; return the seconds of a step.

        Args:
            limit: After a first step that takes longer than this, no other one is taken.
        """
        seconds: float = 0.0 if self.steps else WORLD.allreduce(self.step(), op=max)
        if seconds <= limit or self.is_late:
            seconds = self.turn(counts=False)
        self.together = max(1, int(TURN_SECONDS / seconds))
        return seconds


def make_net(replica: Any, work: Any) -> Any:
    """Return a model with the arrays of a replica, whose functions compute for as long."""
    import chainer
    import numpy as np

    class Layer(chainer.FunctionNode):
        def __init__(self, forward: int, backward: int, gradient: Any) -> None:
            self.units = forward, backward
            self.gradient = gradient

        def forward(self, inputs: Any) -> Any:
            work.run(self.units[0])
            return (inputs[0] + 0,)

        def backward(self, indexes: Any, grads: Any) -> Any:
            work.run(self.units[1])
            return grads[0], chainer.Variable(self.gradient.copy())

    class Net(chainer.Link):
        def __init__(self) -> None:
            super().__init__()
            self.layers = []
            forward = np.diff(np.linspace(0, replica.forward_units, len(replica.backward_units) + 1).astype(int))
            with self.init_scope():
                for i, (_, param) in enumerate(replica.namedparams()):
                    setattr(self, f"p{i:04}", chainer.Parameter(np.zeros(param.data.shape, np.float32)))
                    self.layers.append((f"p{i:04}", int(forward[i]), replica.backward_units[i], param.grad))

        def __call__(self) -> Any:
            h = chainer.Variable(np.ones(1, np.float32), requires_grad=True)
            for name, forward, backward, gradient in self.layers:
                (h,) = Layer(forward, backward, gradient).apply((h, getattr(self, name)))
            return chainer.functions.sum(h)

    return Net()


def job(args: argparse.Namespace) -> None:
    """Recommend, then train with every choice."""
    from mn_comm import create_communicator
    from mn_tools.bench.advice_report import advice_to_json
    from mn_tools.bench.advise import advise
    from mn_tools.bench.options import parse
    from mn_tools.bench.rehearsal import Replica, Work

    work = Work(WORLD)
    options = parse(["--model", args.model, "--compute", args.compute, "--seconds", args.seconds])
    advice = advise(WORLD, options, work)
    replica = Replica(advice.arrays, work, advice.compute)
    replica.backward()
    comms = {name: create_communicator(name) for name in advice.order}
    exact = {f"{each.choice.strategy}, {each.choice}": each.choice.is_exact for each in advice.estimates}
    trainees: dict[str, Trainee] = {}
    seconds: dict[str, float] = {}
    for each in sorted(advice.estimates, key=lambda each: each.seconds):
        name = f"{each.choice.strategy}, {each.choice}"
        trainees[name] = Trainee(each.choice, comms[each.choice.strategy], replica, work)
        rivals = [s for other, s in seconds.items() if exact[other] or not each.choice.is_exact]
        limit = HOPELESS * min(rivals, default=float("inf"))
        seconds[name] = trainees[name].begin(limit)
        # The buckets of all choices would not fit into memory.
        trainees = {name: each for name, each in trainees.items() if not is_hopeless(name, seconds, exact)}
    compare(trainees, seconds, exact, args.limit)
    if WORLD.rank == 0:
        figures = advice_to_json(advice)
        show(args.job, figures, seconds, exact)
        rounds = {name: each.seconds for name, each in trainees.items()}
        load = os.getloadavg()[0]
        kept = {"case": args.job, "model": args.model, "load": load, "advice": figures, "exact": exact}
        keep(args.json, benchmark="advice", **kept, seconds=seconds, rounds=rounds)


def compare(
    trainees: Mapping[str, Trainee], seconds: dict[str, float], exact: Mapping[str, bool], limit: float
) -> None:
    """Let trainees take turns, and set their median seconds; collective."""
    close = dict(trainees)
    end = time.perf_counter() + limit
    for round_ in range(ROUNDS):
        for trainee in close.values():
            trainee.turn()
        seconds.update({name: statistics.median(each.seconds) for name, each in close.items()})
        if round_ >= 1:
            close = {name: each for name, each in close.items() if not is_hopeless(name, seconds, exact, CLOSE)}
        if WORLD.bcast(time.perf_counter() > end):
            break


def is_hopeless(name: str, seconds: Mapping[str, float], exact: Mapping[str, bool], factor: float = HOPELESS) -> bool:
    """Return whether a choice is much slower than the fastest one that it is compared with."""
    rivals = [s for other, s in seconds.items() if exact[other] or not exact[name]]
    return seconds[name] > factor * min(rivals)


def outcome(figures: Mapping[str, Any], seconds: Mapping[str, float], exact: Mapping[str, bool]) -> Iterable[dict]:
    """Yield, for the choices that do not change the training and for all, what was recommended and what is fastest."""
    for key in ("same_training", "any"):
        told = figures["recommended"][key]
        name = f"{told['communicator']}, {told['when']}"
        rivals = {other: s for other, s in seconds.items() if exact[other] or key == "any"}
        fastest = min(rivals, key=rivals.__getitem__)
        yield {
            "among": key,
            "recommended": name,
            "expected": told["step_seconds"],
            "measured": seconds[name],
            "fastest": fastest,
            "its": seconds[fastest],
            "ratio": seconds[name] / seconds[fastest],
        }


def show(case: str, figures: Mapping[str, Any], seconds: Mapping[str, float], exact: Mapping[str, bool]) -> None:
    """Print a case."""
    print(f"\n{case}, {figures['model']}: recommended in {figures['seconds']:.0f} s")
    told = {f"{each['communicator']}, {each['when']}": each for each in figures["choices"]}
    for name, s in sorted(seconds.items(), key=lambda item: item[1]):
        kind = told[name]["from"]
        print(f"  {name:50}{s * 1e3:10.1f} ms, expected {told[name]['step_seconds'] * 1e3:10.1f} from {kind}")
    for row in outcome(figures, seconds, exact):
        print(f"  {row['among']}: {row['recommended']} is {row['ratio']:.2f} x {row['fastest']}")
    sys.stdout.flush()


def table(file: str) -> None:
    """Print the table of the cases in a file, the last measurement of each."""
    cases = {}
    for line in Path(file).read_text().splitlines():
        figures = json.loads(line)
        cases[figures["case"], figures["model"]] = figures
    print("# Recommended, and measured")
    for key, title in (("same_training", "the same training"), ("any", "of all choices")):
        print(f"\n| {title} | recommended | expected, ms | measured, ms | fastest | measured, ms | ratio | load |")
        print("|---|---|---|---|---|---|---|---|")
        for (case, model), figures in cases.items():
            rows = outcome(figures["advice"], figures["seconds"], figures["exact"])
            row = next(row for row in rows if row["among"] == key)
            times = [f"{row[each] * 1e3:,.0f}" for each in ("expected", "measured", "its")]
            names = [short(row[each]) for each in ("recommended", "fastest")]
            cells = [f"{case}, {model}", names[0], *times[:2], names[1], times[2], f"{row['ratio']:.2f}"]
            print(f"| {' | '.join(cells)} | {figures['load']:.0f} |")


def short(name: str) -> str:
    """Return a choice as it is shown in the table."""
    strategy, _, when = name.partition(", ")
    return f"`{strategy}`, `{when}`"


def main() -> None:
    """Run a case, or all, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", metavar="CASE", help="the name of the case that this process is part of")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--compute", default="20ms")
    parser.add_argument("--seconds", default="45s", help="how long the recommendation may take")
    parser.add_argument("--limit", type=float, default=45, help="how many seconds to train with the leading choices")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--json", default="", help="a file to add the figures to, as lines of JSON")
    parser.add_argument("--table", default="", help="print the table of this file")
    args = parser.parse_args()
    if args.table:
        table(args.table)
    elif args.job:
        job(args)
    else:
        for model, compute in MODELS.items():
            for case, launcher in PLACES.items():
                if args.only in f"{case}, {model}":
                    what = ["--job", case, "--model", model, "--compute", compute, "--seconds", args.seconds]
                    script = [sys.executable, __file__, *what, "--limit", str(args.limit), "--json", args.json]
                    subprocess.run([*launcher, *script], cwd=ROOT, check=False, timeout=1500)


if __name__ == "__main__":
    main()
