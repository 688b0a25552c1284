"""Lose a host of a training, on virtual hosts of this machine, and check that the training continues.

``python tools/lost_hosts.py --jobs 3`` runs jobs with two ranks on each of two hosts (``tools/cluster.py``, which needs
root) with the ``mpiexec`` beside this Python. It prints how long it took from each loss until all ranks had completed
their next step. Its exit status is 1 if a training did not reach its end, or lost more steps than lie between two saved
states.

There are these kinds of loss:

``ranks``
    All ranks of a host are killed. The communicator is elastic (Open MPI), and the other ranks continue.
    For the other kinds of loss, ``chainermn elastic`` runs the job, and restarts it.
``daemon``
    The process that ``mpiexec`` has started on the host, and which has started the ranks, is killed.
``link``
    Everything that is sent to the host or by the host is lost, and no process is notified.
``machine``
    The same, and every process on the host is killed, as in a power failure.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster

LOSSES = ("ranks", "daemon", "link", "machine")
PERIOD = 10  # steps between two states that are saved
FIRST_STEP = 25  # the loss happens once all ranks have reached this step
STEPS_AFTERWARDS = 20
SECONDS_AFTERWARDS = 2.5  # at least; otherwise a fast training would reach its end before a lost daemon is noticed
LOSS = "loss"  # a file that exists once the loss has begun
_FIRST, _LOST = "node1", "node2"
_POLL_SECONDS = 0.002

Note = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a training.

    Attributes:
        status: Its exit status.
        said: Its output.
        seconds: From the loss until all ranks had completed their next step.
        steps_lost: How many steps were repeated.
        ranks: The number of ranks with which it continued.
        seconds_of_the_lost: From the loss until the last rank of the lost host had ended.
    """

    status: int
    said: str
    seconds: float
    steps_lost: int
    ranks: int
    seconds_of_the_lost: float


def main() -> int:
    """Run the requested jobs, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3, help="how many jobs for each kind of loss; default %(default)s")
    parser.add_argument("--losses", default="", help=f"some of {','.join(LOSSES)}; default: all that the MPI allows")
    parser.add_argument("--patience", type=float, default=60, help="seconds after which a job counts as hung")
    parser.add_argument("--verbose", action="store_true", help="show the output of each job")
    parser.add_argument("--json", default="", help="a file to add the figures to, as lines of JSON")
    parser.add_argument("--train", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--elastic", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(Path(args.train), elastic=args.elastic)
        return 0
    missing = cluster.what_is_missing()
    if missing:
        print(f"no virtual cluster here: {missing}", file=sys.stderr)
        return 77
    losses = args.losses.split(",") if args.losses else LOSSES if is_open_mpi() else LOSSES[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    found: dict[str, list[Outcome]] = {loss: [] for loss in losses}
    for _ in range(args.jobs):
        for loss in losses:
            found[loss].append(lose(loss, args.patience))
            if args.verbose:
                print(f"{loss}: {found[loss][-1]}\n{found[loss][-1].said}", flush=True)
    failed = report(found)
    if args.json:
        keep(Path(args.json), found)
    return int(failed)


def report(found: dict[str, list[Outcome]]) -> bool:
    """Print a table, and return whether a training has failed."""
    failed = False
    print(f"{'':10}{'jobs':>6}{'median, s':>12}{'longest, s':>12}{'steps lost':>12}{'its ranks end, s':>18}{'left':>6}")
    for loss, outcomes in found.items():
        good = [each for each in outcomes if not each.status and each.steps_lost <= PERIOD]
        failed |= len(good) < len(outcomes)
        if good:
            seconds, ends = [e.seconds for e in good], [e.seconds_of_the_lost for e in good]
            line = f"{len(good):6}{statistics.median(seconds):12.2f}{max(seconds):12.2f}"
            ranks = max(e.ranks for e in good)
            print(f"{loss:10}{line}{max(e.steps_lost for e in good):12}{max(ends):18.2f}{ranks:6}", flush=True)
        for each in outcomes:
            if each not in good:
                print(f"{loss}: {each}\n{each.said}")
    return failed


def keep(file: Path, found: dict[str, list[Outcome]]) -> None:
    """Add figures to a file, as a line of JSON for each kind of loss."""
    with file.open("a") as lines:
        for loss, outcomes in found.items():
            figures = [{k: v for k, v in dataclasses.asdict(each).items() if k != "said"} for each in outcomes]
            library = "Open MPI" if is_open_mpi() else "MPICH"
            lines.write(json.dumps({"benchmark": "lost_hosts", "mpi": library, "loss": loss, "jobs": figures}) + "\n")


def is_open_mpi() -> bool:
    """Return whether the launcher beside this Python is Open MPI's."""
    version = subprocess.run([_beside("mpiexec"), "--version"], capture_output=True, text=True, check=True).stdout
    return "HYDRA" not in version


def _beside(name: str) -> str:
    return shutil.which(name, path=os.path.dirname(sys.executable)) or name


def lose(loss: str, patience: float) -> Outcome:
    """Run a training, lose a part of it, and wait for its end.

    Args:
        loss: The kind of loss: one of :data:`LOSSES`.
        patience: The number of seconds after which the job counts as hung.

    Raises:
        TimeoutError: The job has hung.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(cluster.cluster(2))
        stack.enter_context(hosts.knowing_each_other())
        watched = Watched(folder, time.monotonic() + patience)
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        output = stack.enter_context((folder / "log").open("w"))
        job = subprocess.Popen(
            hosts.command_on(_FIRST, command_for(loss, hosts, folder)),
            env={**hosts.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            lost = watched.wait_for(lambda: victims(watched.notes()) or job.poll() is not None)
            if not isinstance(lost, list):
                return Outcome(job.returncode or 1, watched.said(), 0.0, 0, 0, 0.0)
            began = time.monotonic()
            (folder / LOSS).touch()
            take_away(loss, hosts, lost)
            watched.wait_for(lambda: not any(is_alive(each["process"]) for each in lost))
            ended = time.monotonic()
            watched.wait_for(lambda: job.poll() is not None)
        finally:
            job.kill()
            job.wait()
        return outcome_of(job.returncode, watched, began, ended)


def command_for(loss: str, hosts: cluster.Hosts, folder: Path) -> list[str]:
    """Return the command that runs a training on all hosts."""
    script = [__file__, "--train", str(folder)]
    where = ",".join(f"{name}:2" for name in hosts.names)
    if loss == "ranks":
        return [
            _beside("mpiexec"),
            "--with-ft",
            "ulfm",
            "--host",
            where,
            "-n",
            "4",
            sys.executable,
            *script,
            "--elastic",
        ]
    supervisor = [sys.executable, "-m", "chainermn", "elastic", "-n", "4", "--hosts", where, "--min", "2"]
    return [*supervisor, "--ssh", str(hosts.ssh), *script]


def take_away(loss: str, hosts: cluster.Hosts, ranks: list[Note]) -> None:
    """Cause a loss."""
    if loss == "ranks":
        for each in ranks:
            os.kill(each["process"], signal.SIGKILL)
    elif loss == "daemon":
        os.kill(ranks[0]["parent"], signal.SIGKILL)
    else:
        hosts.cut(_LOST)
        if loss == "machine":
            hosts.kill(_LOST)


def victims(notes: list[Note]) -> list[Note]:
    """Return the first notes of the ranks that will be lost, once all ranks have reached :data:`FIRST_STEP`."""
    if not notes or min((note["step"] for note in last_of_each(notes)), default=0) < FIRST_STEP:
        return []
    return [note for note in notes if note["what"] == "begin" and note["host"] == _LOST]


def last_of_each(notes: list[Note]) -> list[Note]:
    """Return the last note of each rank."""
    return [*{(note["attempt"], note["rank"]): note for note in notes}.values()]


def outcome_of(status: int, watched: Watched, began: float, ended: float) -> Outcome:
    """Return the outcome of a training that has ended."""
    notes, said = watched.notes(), watched.said()
    steps = [note for note in notes if note["what"] == "step"]
    # If ranks are lost one by one, the last loss counts. A host that is cut off may note the end of a step that
    # the other host does not complete.
    latest = max(((note["attempt"], note["generation"]) for note in steps), default=(1, 0))
    went_on = [
        note
        for note in steps
        if (note["attempt"], note["generation"]) == latest and (latest != (1, 0) or note["time"] > began)
    ]
    if status or not went_on:
        return Outcome(status or 1, said, 0.0, 0, 0, ended - began)
    earlier = [note["step"] for note in steps if note not in went_on]
    if not earlier:
        return Outcome(1, f"{said}\nthe first attempt ended before its first step", 0.0, 0, 0, ended - began)
    ranks = {note["rank"] for note in went_on}
    first = [next(note for note in went_on if note["rank"] == rank) for rank in ranks]
    return Outcome(
        status,
        said,
        max(note["time"] for note in first) - began,
        max(earlier) + 1 - min(note["step"] for note in first),
        len(ranks),
        ended - began,
    )


def is_alive(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Watched:
    """The notes that the ranks of a job write to files.

    Args:
        folder: The folder of the files.
        deadline: When to stop waiting.
    """

    def __init__(self, folder: Path, deadline: float) -> None:
        self._folder = folder
        self._deadline = deadline

    def notes(self) -> list[Note]:
        """Return all notes so far."""
        return [*self._read()]

    def said(self) -> str:
        """Return the output of the job so far."""
        return (self._folder / "log").read_text(errors="replace")

    def _read(self) -> Iterator[Note]:
        for file in sorted(self._folder.glob("rank-*")):
            *lines, _ = file.read_text().split("\n")  # the last one may not be complete
            yield from map(json.loads, lines)

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition is true, and return its value."""
        while not (found := condition()):
            if time.monotonic() > self._deadline:
                raise TimeoutError(self.said())
            time.sleep(_POLL_SECONDS)
        return found


def train(folder: Path, *, elastic: bool) -> None:
    """Train on one rank until some steps after the loss, and note each step."""
    import socket

    import chainer
    import chainermn
    import numpy as np

    import mn_comm

    attempt = int(os.environ.get("CHAINERMN_SUPERVISOR", "1").split()[-1])
    comm = chainermn.create_communicator("two_dimensional", elastic=elastic)
    rank = comm.rank
    file = os.open(folder / f"rank-{attempt}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, step: int, **more: object) -> None:
        generation = comm.generation if elastic else 0
        line = {"what": what, "attempt": attempt, "rank": rank, "generation": generation, "step": step, **more}
        os.write(file, (json.dumps(line) + "\n").encode())

    note("begin", 0, time=time.monotonic(), host=socket.gethostname(), process=os.getpid(), parent=os.getppid())
    model = chainer.links.Classifier(chainer.links.Linear(500, 500))  # a megabyte
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(), comm).setup(model)
    data = chainer.datasets.TupleDataset(np.ones((256, 500), "f"), np.zeros(256, "i"))
    iterator = chainermn.iterators.ElasticIterator(data, 8, comm, seed=0)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    last_step: list[int] = []

    def is_over() -> bool:
        """Return whether the loss lies far enough back."""
        try:
            return time.time() - (folder / LOSS).stat().st_mtime > SECONDS_AFTERWARDS
        except FileNotFoundError:
            return False

    def has_ended(trainer: chainer.training.Trainer) -> bool:
        if not last_step and mn_comm.transact(comm, lambda: comm.bcast_obj(is_over())):
            last_step.append(trainer.updater.iteration + STEPS_AFTERWARDS)
        return trainer.updater.iteration in last_step

    trainer = chainer.training.Trainer(updater, has_ended, out=str(folder / "result"))
    keeper = chainermn.extensions.create_memory_keeper(comm)
    trainer.extend(keeper, trigger=(PERIOD, "iteration"))

    @trainer.extend  # type: ignore[untyped-decorator]
    @chainer.training.make_extension(trigger=(1, "iteration"))  # type: ignore[untyped-decorator]
    def note_step(trainer: chainer.training.Trainer) -> None:
        note("step", trainer.updater.iteration, time=time.monotonic())

    keeper.maybe_load(trainer)
    trainer.run()


if __name__ == "__main__":
    sys.exit(main())
