"""Kill ranks of elastic trainings at places that depend on a seed, and check that the others continue correctly.

``python tools/kills.py --jobs 100`` runs 100 jobs of 2 to 4 ranks with Open MPI, whose ``mpiexec`` must be in the same
folder as this Python, and prints a table: how many ranks were killed in which phase, and the time from each kill to the
next complete step. It ends with status 1 if a job hung or failed, or if ranks differed after any step.

A job trains a small network for some iterations, with an evaluator and a checkpointer. Each victim is killed before a
wait for other ranks, counted from the beginning of a phase, or by a thread some time after the beginning. With
``--spares`` each job has one or two spares, which replace the killed ranks, and may themselves be killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from mn_comm import building_blocks

STRATEGIES = [name for name, kind in building_blocks.STRATEGIES.items() if kind.on_host and kind.communicates]
WHEN = ["AfterBackward", "AfterBackward", "DuringBackward", "OneStepLate"]
PHASES = ["update", "update", "first", "evaluator", "checkpoint", "end"]
ITERATIONS = 18


@dataclasses.dataclass(frozen=True)
class Victim:
    """A rank that is killed.

    Attributes:
        phase: The phase: one of those above; ``recovery``, after another rank was killed; or ``joining``, while a
            spare takes a place.
        iteration: The first iteration in which it may be killed.
        wait: The number of the wait, from the beginning of the phase, before which it is killed.
        seconds: If above 0, the time after the beginning of the phase, which replaces ``wait``.
    """

    phase: str
    iteration: int
    wait: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job, as a seed determines it."""

    seed: int
    ranks: int
    strategy: str
    when: str
    victims: dict[int, Victim]
    spares: int = 0


def plan_with_spares(seed: int) -> Plan:
    """Return the job for a seed, with spares."""
    random = np.random.RandomState(seed)
    ranks, spares = int(random.randint(2, 4)), int(random.randint(1, 3))
    order = [int(each) for each in random.permutation(ranks)]
    at = int(random.randint(1, ITERATIONS - 6))
    victims = {order[0]: Victim(PHASES[:2][seed % 2], at, int(random.randint(0, 9)), 0.0)}
    # A rank that lets spares join, or the first spare; another one of the same kind always survives.
    other = order[1] if seed % 2 and ranks > 2 else ranks
    if seed % 4 < 3 and (spares > 1 or other < ranks):
        victims[other] = Victim("joining", 0, int(random.randint(0, 14)), 0.0)
    when = WHEN[seed // 3 % len(WHEN)]
    return Plan(seed, ranks, STRATEGIES[seed % len(STRATEGIES)], when, victims, spares)


def plan(seed: int) -> Plan:
    """Return the job for a seed."""
    random = np.random.RandomState(seed)
    ranks = int(random.randint(2, 5))
    n_victims = int(random.randint(1, ranks)) if ranks > 2 else 1
    victims = {}
    for number, rank in enumerate(random.permutation(ranks)[:n_victims]):
        phase = "recovery" if number else PHASES[(seed + number) % len(PHASES)]
        is_timed = random.rand() < 0.3
        victims[int(rank)] = Victim(
            phase,
            0 if phase == "first" else int(random.randint(1, ITERATIONS - 6)),
            int(random.randint(0, 9)),
            float(random.exponential(0.003)) if is_timed else 0.0,
        )
    return Plan(seed, ranks, STRATEGIES[seed % len(STRATEGIES)], WHEN[seed // 3 % len(WHEN)], victims)


def run(job: Plan, patience: float) -> tuple[str, list[dict[str, object]]]:
    """Run a job.

    Args:
        job: The job.
        patience: The number of seconds after which it counts as hung.

    Returns:
        The problem, if any, and the notes of its ranks.
    """
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    with tempfile.TemporaryDirectory() as folder:
        processes = str(job.ranks + job.spares)
        command = [mpiexec, "--with-ft", "ulfm", "-n", processes, sys.executable, __file__, "--train"]
        environ = {
            **os.environ,
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMP_NUM_THREADS": "1",
            "KILLS_STACKS_AFTER": str(0.8 * patience),
            "CHAINERMN_SPARES": str(job.spares),
        }
        log = Path(folder, "log")
        with log.open("w") as output:
            started = [*command, str(job.seed), "--folder", folder, *(["--spares"] if job.spares else [])]
            process = subprocess.Popen(started, stdout=output, stderr=output, env=environ)
            try:
                status = process.wait(patience)
            except subprocess.TimeoutExpired:
                return f"hung for {patience:.0f} s\n{log.read_text()}", []
            finally:
                process.terminate()
                process.wait()
        notes = [json.loads(line) for file in Path(folder).glob("rank-*") for line in file.read_text().splitlines()]
        problem = check(job, notes)
        if status:
            problem = f"status {status}; {problem}"
        return (f"{problem}\n{log.read_text()}" if problem else ""), notes


def check(job: Plan, notes: list[dict[str, object]]) -> str:
    """Return the problem with the steps in the notes, if any."""
    steps = [note for note in notes if "digest" in note]
    for iteration in range(ITERATIONS):
        digests = {note["digest"] for note in steps if note["iteration"] == iteration}
        if len(digests) > 1:
            return f"ranks differ after iteration {iteration}"
    killed = {note["rank"] for note in notes if "killed" in note}
    joined = {note["rank"]: note["joined"] for note in notes if "joined" in note}
    begun = {rank: 0 for rank in range(job.ranks)} | joined
    for rank in sorted(set(begun) - killed):
        if [note["iteration"] for note in steps if note["rank"] == rank] != list(range(begun[rank], ITERATIONS)):  # type: ignore[call-overload]
            return f"rank {rank} has not reached the end"
    sizes = {note["size"] for note in steps if note["iteration"] == ITERATIONS - 1}
    left = min(job.ranks, job.ranks + job.spares - len(killed))
    return "" if not job.spares or sizes == {left} else f"expected {left} ranks at the end, got {sizes}"


def latencies(notes: list[dict[str, object]]) -> list[float]:
    """Return, for each kill, the milliseconds to the completion of a step that began without that rank."""
    found = []
    for kill in (note for note in notes if "killed" in note):
        later = [n["time"] for n in notes if "digest" in n and n["rank"] != kill["rank"] and n["time"] > kill["time"]]  # type: ignore[operator]
        if later:
            found.append(1000 * (min(later) - kill["time"]))  # type: ignore[operator,type-var]
    return found


def main() -> int:
    """Run the requested jobs, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=12, help="how many jobs; default %(default)s")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--patience", type=float, default=60, help="seconds after which a job counts as hung")
    parser.add_argument("--spares", action="store_true", help="run jobs with spares")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    plan_of = plan_with_spares if arguments.spares else plan
    if arguments.train is not None:
        train(plan_of(arguments.train), arguments.folder)
        return 0
    tally = Tally()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for seed in range(arguments.first, arguments.first + arguments.jobs):
            problem, notes = run(plan_of(seed), arguments.patience)
            tally.add(notes, bool(problem))
            if problem:
                print(f"{plan_of(seed)}: {problem}", flush=True)
    finally:
        print(tally)
    return int(tally.failed > 0)


class Tally:
    """The results of the jobs so far."""

    def __init__(self) -> None:
        self.jobs = 0
        self.failed = 0
        self._kills: Counter[str] = Counter()
        self._times: list[float] = []

    def add(self, notes: list[dict[str, object]], has_failed: bool) -> None:
        """Count another job."""
        self.jobs += 1
        self.failed += has_failed
        for note in notes:
            if "killed" in note:
                self._kills[str(note["killed"])] += 1
                self._kills["rank 0"] += note["rank"] == 0
        self._times += latencies(notes)

    def __str__(self) -> str:
        """Return a table."""
        total = sum(count for name, count in self._kills.items() if name != "rank 0")
        lines = [f"{self.jobs} jobs, {total} kills, {self.failed} failed"]
        lines += [f"  {name:<34} {count}" for name, count in sorted(self._kills.items())]
        if self._times:
            median, most = statistics.median(self._times), max(self._times)
            lines.append(f"from a kill to the next step: median {median:.0f} ms, at most {most:.0f} ms")
        return "\n".join(lines)


def train(job: Plan, folder: Path) -> None:
    """Train on one rank, and record every step."""
    import chainer
    import chainer.functions as F
    import chainer.links as L
    import chainermn
    from chainermn import create_multi_node_checkpointer, create_multi_node_evaluator, optimizers

    class Net(chainer.Chain):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.hidden, self.norm, self.out = L.Linear(None, 64), L.BatchNormalization(64), L.Linear(64, 4)

        def forward(self, x: np.ndarray, t: np.ndarray) -> chainer.Variable:
            loss = F.softmax_cross_entropy(self.out(F.dropout(F.relu(self.norm(self.hidden(x))))), t)
            chainer.report({"loss": loss}, self)
            return loss

    faulthandler.dump_traceback_later(float(os.environ["KILLS_STACKS_AFTER"]))
    comm = chainermn.create_communicator(job.strategy, elastic=True)
    rank = comm.rank
    notes = Notes(rank, folder)
    killer = Killer(job.victims.get(rank), notes, job.when)
    np.random.seed(rank)
    net = Net()
    optimizer = optimizers.MultiNodeOptimizer(chainer.optimizers.Adam(), comm, getattr(optimizers, job.when)()).setup(
        net
    )
    random = np.random.RandomState(100 + rank)
    dataset = chainer.datasets.TupleDataset(random.rand(16, 10).astype("f"), random.randint(0, 4, 16).astype("i"))
    iterator = chainer.iterators.SerialIterator(dataset, 8, repeat=False, shuffle=False)
    evaluator = create_multi_node_evaluator(chainer.training.extensions.Evaluator(iterator, net), comm)
    checkpointer = create_multi_node_checkpointer("run", comm, path=folder)
    keeper = chainermn.extensions.create_memory_keeper(comm)
    state = State(optimizer, net)
    begin = keeper.maybe_load(state, optimizer)
    if begin is not None:
        notes.write(joined=begin)
    for iteration in range(begin or 0, ITERATIONS):
        killer.arm("update" if iteration else "first", iteration)
        optimizer.update(net, random.rand(8, 10).astype("f"), random.randint(0, 4, 8).astype("i"))
        killer.disarm()
        notes.write(iteration=iteration, digest=digest(optimizer, net), size=comm.size)
        if iteration % 3 == 2:
            killer.arm("evaluator", iteration)
            evaluator()
            killer.disarm()
        if iteration % 6 == 5:
            killer.arm("checkpoint", iteration)
            checkpointer.save(net, iteration)
            killer.disarm()
        keeper.keep(state, iteration + 1)
    comm.barrier()
    checkpointer.finalize()
    killer.arm("end", ITERATIONS)


class State:
    """The state that a spare receives.

    Args:
        optimizer: The optimizer.
        net: Its model.
    """

    def __init__(self, optimizer: Any, net: Any) -> None:
        self._optimizer = optimizer
        self._net = net

    def serialize(self, serializer: Any) -> None:
        """Save or load the state."""
        self._net.serialize(serializer["model"])
        self._optimizer.serialize(serializer["optimizer:main"])  # with this name, it may have no state yet


def digest(optimizer: object, net: object) -> str:
    """Return a value that is equal if parameters and the optimizer's state are equal."""
    import hashlib

    hashed = hashlib.blake2b(str(optimizer.t).encode(), digest_size=8)  # type: ignore[attr-defined]
    for _, param in sorted(net.namedparams()):  # type: ignore[attr-defined]
        hashed.update(param.array.tobytes())
        for _, value in sorted((param.update_rule.state or {}).items()):
            hashed.update(np.asarray(value).tobytes())
    return hashed.hexdigest()


class Notes:
    """The records of a rank, written immediately to a separate file."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank = rank
        self._file = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **what: object) -> None:
        """Record something, with the time."""
        import time

        os.write(self._file, (json.dumps({"rank": self._rank, "time": time.monotonic(), **what}) + "\n").encode())


class Killer:
    """Kills this process at the planned place."""

    def __init__(self, victim: Victim | None, notes: Notes, variant: str) -> None:
        from mn_comm.ranks.watch import Activity

        self._victim = victim
        self._notes = notes
        self._variant = variant
        self._left: int | None = None
        self._wait_for = Activity.wait_for
        if victim is not None:
            Activity.wait_for = lambda *args: self._waits(*args)  # type: ignore[method-assign,assignment,misc]
            if victim.phase == "joining":
                self._begin_when_one_joins()

    def _begin_when_one_joins(self) -> None:
        from mn_elastic.spares import Pool

        muster, times = Pool.muster, [0]

        def musters(pool: Pool, *args: int) -> object:
            times[0] += 1
            if times[0] == 2:  # the first one sets the spares aside
                self._begin()
            return muster(pool, *args)

        Pool.muster = musters  # type: ignore[method-assign,assignment]

    def arm(self, phase: str, iteration: int) -> None:
        """Begin a phase."""
        victim = self._victim
        if victim is not None and victim.phase == phase and iteration >= victim.iteration and self._left is None:
            self._begin()

    def disarm(self) -> None:
        """End a phase: a victim of this phase dies now, if it is still alive."""
        if self._left is not None and self._victim is not None and not self._victim.seconds:
            self._kill("after")

    def _begin(self) -> None:
        import threading
        import time

        victim = self._victim
        assert victim is not None
        self._left = victim.wait

        def kill_later() -> None:
            time.sleep(victim.seconds)
            self._kill("timed in")

        if victim.seconds:
            threading.Thread(target=kill_later, daemon=True).start()

    def _waits(self, activity: object, call: object, what: str, *args: object) -> object:
        victim = self._victim
        assert victim is not None
        if victim.phase == "recovery" and what == "Shrink" and self._left is None:
            self._begin()
        if self._left is not None and not victim.seconds:
            self._left -= 1
            if self._left < 0:
                self._kill("in")
        return self._wait_for(activity, call, what, *args)  # type: ignore[arg-type]

    def _kill(self, how: str) -> None:
        assert self._victim is not None
        self._notes.write(killed=f"{how} {self._victim.phase} {self._variant}".strip())
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
