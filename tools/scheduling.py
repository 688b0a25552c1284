"""Decides which tests run beside one another, for ``tools/run_tests.py``.

A task is one process or one MPI job. How long it takes, and how many cores it keeps busy meanwhile, is known from the
last time it ran. Tasks that mostly wait run beside those that compute, the longest first, and more of them while cores
have nothing to do; a task that measures times runs when nothing else does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue

__all__ = ["HUNG", "LIMIT", "Cost", "Ended", "IdleCores", "Record", "Schedule", "Task", "run_all"]

# Seconds; for a job that hangs outside the time-outs of its tests, for example while MPI is finalized. On a busy
# machine, a job of hundreds of tests takes ten times as long.
LIMIT = 1800
HUNG = 124
# A rank that shares its core with one process that mostly waits loses little.
_MOST_LOAD = 1.25  # for each core
_MOST_TASKS = 3  # for each core: every process needs memory
_LEAST_IDLE = 0.3  # of a core; with less, another task would only slow down those that run
_IDLE_SECONDS = 1.5  # a new task first waits for its files; so long, it is not known how much it computes


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a task took.

    Args:
        seconds: By the clock.
        load: The mean number of cores that it kept busy.
        failed: Whether it failed.
    """

    seconds: float
    load: float
    failed: bool = False


@dataclasses.dataclass(frozen=True)
class Task:
    """One process to be started.

    Args:
        name: Tells it from all others, also those of the next run.
        command: The command line.
        log: The file for what it prints.
        environ: Variables of the environment, in addition to this process's.
        cost: What it took last time, or an estimate.
        cores: The number of cores to reserve for it: beside others, it may have kept less busy than it would alone.
        needs: The names of the tasks before it; it is not started unless all of them succeeded.
        limit: The maximum number of seconds.
    """

    name: str
    command: Sequence[str]
    log: Path
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cost: Cost = Cost(10.0, 1.0)
    cores: float = 1.0
    needs: frozenset[str] = frozenset()
    limit: float = LIMIT


@dataclasses.dataclass(frozen=True)
class Ended:
    """A task that has ended; its status is None if it was not started, because a task that it needs had failed."""

    task: Task
    status: int | None
    cost: Cost


class Record:
    """What each task took the last time, in a file.

    Args:
        file: The file; it does not have to exist.
        first: A file with what tasks took elsewhere, for those that have not run here yet.
    """

    def __init__(self, file: Path, first: Path | None = None) -> None:
        self._file = file
        self._costs = _read_costs(file)
        self._first = {} if first is None else _read_costs(first)

    def estimate(self, name: str, otherwise: Cost) -> Cost:
        """Return what a task took the last time, here or elsewhere, or else the given cost."""
        return self._costs.get(name, self._first.get(name, otherwise))

    def keep(self, name: str, cost: Cost) -> None:
        """Write down what a task took, also if this process is killed later."""
        self._costs[name] = cost
        text = json.dumps({name: dataclasses.astuple(cost) for name, cost in sorted(self._costs.items())}, indent=0)
        part = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(self._file)


def _read_costs(file: Path) -> dict[str, Cost]:
    try:
        return {name: Cost(*cost) for name, cost in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # none yet, or of another version
        return {}


class IdleCores:
    """How many cores had nothing to do; other programs count as well.

    Args:
        file: Linux's count of what the cores have done since the machine was started.
    """

    def __init__(self, file: Path = Path("/proc/stat")) -> None:
        self._file = file
        self._began = time.monotonic()
        self._idle, self._all = self._read()

    def __call__(self) -> float:
        """Return the mean number of idle cores since the last answer; 0 if that was a moment ago."""
        now = time.monotonic()
        if now - self._began < _IDLE_SECONDS:
            return 0.0
        before, self._began = (self._idle, self._all), now
        self._idle, self._all = self._read()
        return (os.cpu_count() or 1) * (self._idle - before[0]) / max(self._all - before[1], 1)

    def _read(self) -> tuple[int, int]:
        """Return for how long the cores have been idle, and how much time has passed on all of them."""
        try:
            times = [int(word) for word in self._file.read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:  # not Linux
            return 0, 0
        return times[3] + times[4], sum(times)


class Schedule:
    """Which task is next; it starts none.

    Args:
        tasks: All tasks.
        cores: The number of cores.
        idle_cores: Returns how many of them have nothing to do, if that is known.
    """

    def __init__(self, tasks: Iterable[Task], cores: int, idle_cores: Callable[[], float] = float) -> None:
        self.waiting = _sort(list(tasks))
        self.running: list[Task] = []
        self._succeeded: set[str] = set()
        self._cores = cores
        self._idle_cores = idle_cores

    def start(self) -> Task | None:
        """Return a task to be started now, or None if none fits beside those that run."""
        task = self._choose()
        if task is not None:
            self.waiting.remove(task)
            self.running.append(task)
        return task

    def end(self, task: Task, *, succeeded: bool) -> list[Task]:
        """Note that a task has ended; return those that will not run, because they need it."""
        self.running.remove(task)
        if succeeded:
            self._succeeded.add(task.name)
            return []
        lost, names = [], {task.name}
        while found := [other for other in self.waiting if other.needs & names]:
            lost += found
            names |= {other.name for other in found}
            self.waiting = [other for other in self.waiting if other not in found]
        return lost

    def seconds_left(self) -> float:
        """Estimate how long the rest takes, if all goes as it did last time."""
        left = [*self.waiting, *self.running]
        work = sum(task.cost.seconds * min(task.cost.load, self._cores) for task in left)
        return max([work / self._cores, *(task.cost.seconds for task in left)])

    def _choose(self) -> Task | None:
        if len(self.running) >= _MOST_TASKS * self._cores:
            return None
        ready = [task for task in self.waiting if task.needs <= self._succeeded]
        # While a job of several ranks runs, what mostly waits fills its gaps. Such jobs run one after the other, and
        # the next one must not wait until all small tasks are done.
        large = [task for task in ready if self._is_large(task)]
        small = [task for task in ready if not self._is_large(task)]
        candidates = small if any(self._is_large(task) for task in self.running) or not large else large[:1]
        fitting = next((task for task in candidates if self._fits(task)), None)
        if fitting is None and candidates and self._idle_cores() >= _LEAST_IDLE:
            return candidates[0]
        return fitting

    def _is_large(self, task: Task) -> bool:
        return task.cores > max(1.2, self._cores / 2)

    def _fits(self, task: Task) -> bool:
        load = sum(min(other.cores, self._cores) for other in self.running)
        return not self.running or load + min(task.cores, self._cores) <= _MOST_LOAD * self._cores


def _sort(tasks: Sequence[Task]) -> list[Task]:
    """Return what failed last time, then the tasks after which the most remains to be done."""

    def rank(task: Task) -> tuple[bool, float]:
        after = [other.cost.seconds for other in tasks if task.name in other.needs]
        return not task.cost.failed, -task.cost.seconds - max(after, default=0.0)

    return sorted(tasks, key=rank)


def run_all(
    schedule: Schedule, ended: Callable[[Ended], bool], show: Callable[[Schedule], None], scratch: Path
) -> None:
    """Run all tasks.

    Args:
        schedule: The tasks.
        ended: Is called with each task that has ended, and returns whether it succeeded.
        show: Is called once a second.
        scratch: An empty folder. Each task has a folder for temporary files in it: killed jobs leave some behind, named
            after the number of a process, and a later job with the same number would fail.
    """
    done: Queue[Ended] = Queue()
    processes: list[subprocess.Popen[bytes]] = []
    number = 0
    try:
        while schedule.waiting or schedule.running:
            while (task := schedule.start()) is not None:
                number += 1
                folder = scratch / str(number)
                folder.mkdir()
                processes.append(_start(task, folder, done))
            show(schedule)
            for one in _take(done):
                for lost in schedule.end(one.task, succeeded=ended(one)):
                    ended(Ended(lost, None, Cost(0.0, 0.0, failed=True)))
    finally:
        for process in processes:
            process.terminate()  # Ctrl-C; the tasks have received it, too


def _take(done: Queue[Ended]) -> Collection[Ended]:
    try:
        return [done.get(timeout=1)]
    except Empty:
        return []


def _start(task: Task, folder: Path, done: Queue[Ended]) -> subprocess.Popen[bytes]:
    task.log.parent.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, **task.environ, "TMPDIR": str(folder)}
    with task.log.open("wb") as log:
        process = subprocess.Popen(
            task.command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    threading.Thread(target=_wait, args=(task, process, done), daemon=True).start()
    return process


def _wait(task: Task, process: subprocess.Popen[bytes], done: Queue[Ended]) -> None:
    began = time.monotonic()
    hung = threading.Event()

    def end() -> None:
        hung.set()
        os.kill(process.pid, signal.SIGTERM)

    timer = threading.Timer(task.limit, end)
    timer.start()
    # Popen.wait does not say how much time the process and its children had on the cores.
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    if hung.is_set():
        with task.log.open("a") as log:
            log.write(f"\nthe job did not end within {task.limit:g} s\n")
    code = HUNG if hung.is_set() else process.returncode
    load = (usage.ru_utime + usage.ru_stime) / max(seconds, 0.01)
    done.put(Ended(task, code, Cost(round(seconds, 2), round(load, 2), failed=code != 0)))
