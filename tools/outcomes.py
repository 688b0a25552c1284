"""Reads what pytest has reported, and shows it, for ``tools/run_tests.py``: progress, failures, a table, slow tests."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO
from xml.etree import ElementTree

from scheduling import Ended, Schedule

__all__ = ["Display", "Outcome", "count", "read", "show_summary"]

NO_TESTS = 5  # pytest's exit status
_SLOWEST = 20
_RED, _GREEN, _PLAIN, _ERASE = "\033[31m", "\033[32m", "\033[0m", "\r\033[K"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one task.

    Args:
        suite: Under which name it is counted.
        name: The name of the task.
        seconds: What it took by the clock.
        passed: The number of tests that passed.
        failed: The number of tests that failed; at least 1 if the task failed.
        skipped: The number of tests that were skipped.
        failures: The names of those that failed.
        durations: Of each test: seconds, and its name.
    """

    suite: str
    name: str
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()
    durations: tuple[tuple[float, str], ...] = ()

    def __str__(self) -> str:
        """Return one line."""
        counts = f"{_counts([self])} in " if self.passed or self.failed or self.skipped else ""
        return f"{self.name}: {counts}{self.seconds:.1f} s"


def read(suite: str, ended: Ended, reports: Sequence[Path], *, chosen: bool) -> Outcome:
    """Count the tests in JUnit files; a run that failed without mentioning it there counts as one failed test.

    Args:
        suite: Under which name they are counted.
        ended: The task that has ended.
        reports: A file for each rank, the first rank's first; of a task that is not pytest's, none.
        chosen: Whether tests were selected, by -k for example. With a selection, there may be none; without, this is a
            mistake.

    Returns:
        The outcome.
    """
    name, seconds, status = ended.task.name, ended.cost.seconds, ended.status
    if status is None:
        return Outcome(suite, name, 0.0, failed=1, failures=(f"{name} was not run: what it needs has failed",))
    if status == NO_TESTS and chosen:
        return Outcome(suite, name, seconds)
    cases = [_cases(report) for report in reports] or [[]]
    failures = dict.fromkeys(_title(case) for rank in cases for case in rank if _has(case, "failure", "error"))
    skipped = sum(_has(case, "skipped") for case in cases[0])
    passed = sum(not _has(case, "failure", "error", "skipped") for case in cases[0])
    if status != 0 and not failures:
        failures = {f"{name}: status {status}, see {_shown(ended.task.log)}": None}
    failed = max(len(failures), int(status != 0))
    durations = tuple((float(case.get("time", 0)), _title(case)) for case in cases[0])
    return Outcome(suite, name, seconds, passed, failed, skipped, tuple(failures), durations)


def count(outcomes: Iterable[Outcome]) -> tuple[int, int, int]:
    """Return how many tests passed, failed and were skipped."""
    outcomes = list(outcomes)
    return sum(o.passed for o in outcomes), sum(o.failed for o in outcomes), sum(o.skipped for o in outcomes)


class Display:
    """Shows the progress: a line for each task that has ended; on a terminal, also what runs.

    Args:
        n_tasks: The number of tasks.
        stream: Where it is shown.
    """

    def __init__(self, n_tasks: int, stream: TextIO = sys.stdout) -> None:
        self._n_tasks = n_tasks
        self._stream = stream
        self._is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colours = self._is_terminal and "NO_COLOR" not in os.environ
        self._began = time.monotonic()
        self._outcomes: list[Outcome] = []

    def show_end(self, outcome: Outcome, seconds_left: float) -> None:
        """Show that a task has ended."""
        self._outcomes.append(outcome)
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        place = f"{minutes:3}:{seconds:02} [{len(self._outcomes)}/{self._n_tasks}]"
        total = f"{_counts(self._outcomes)}, {_left(seconds_left)}"
        self._write(f"{place} {self.paint(str(outcome), bad=bool(outcome.failed))}  ({total})\n")

    def show_running(self, schedule: Schedule) -> None:
        """Show what runs, if this is a terminal."""
        if self._is_terminal:
            running = ", ".join(task.name for task in schedule.running)
            line = f"{_counts(self._outcomes)}, {_left(schedule.seconds_left())}; running: {running}"
            self._write(line[: os.get_terminal_size(self._stream.fileno()).columns - 1])

    def show_text(self, text: str) -> None:
        """Show what a task has printed."""
        self._write(f"{text.rstrip()}\n")

    def paint(self, text: str, *, bad: bool) -> str:
        """Return a text in red or green, if the terminal has colours."""
        return f"{_RED if bad else _GREEN}{text}{_PLAIN}" if self._colours else text

    def _write(self, text: str) -> None:
        self._stream.write((_ERASE if self._is_terminal else "") + text)
        self._stream.flush()


def show_summary(outcomes: Sequence[Outcome], display: Display, title: str) -> None:
    """Show the failures first, then a table by suite, the slowest tests and the sum."""
    lines: list[str] = []
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    if failures:
        lines += ["", "Failed:", *(display.paint(f"  {failure}", bad=True) for failure in failures)]
    slow = sorted((one for outcome in outcomes for one in outcome.durations), reverse=True)[:_SLOWEST]
    if slow and len(outcomes) > 1:
        lines += ["", "The slowest:", *(f"  {seconds:6.1f} s  {name}" for seconds, name in slow)]
    lines += ["", f"{title}:", *_table(outcomes), ""]
    display.show_text("\n".join(lines))


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    suites = dict.fromkeys(outcome.suite for outcome in outcomes)
    if not suites:
        yield "  no tests"
        return
    width = max(map(len, suites))
    for suite in suites:
        mine = [outcome for outcome in outcomes if outcome.suite == suite]
        yield f"  {suite:<{width}}  {_counts(mine)} in {sum(outcome.seconds for outcome in mine):.0f} s"


def _counts(outcomes: Iterable[Outcome]) -> str:
    passed, failed, skipped = count(outcomes)
    return f"{passed} passed, {failed} failed, {skipped} skipped"


def _left(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min left" if seconds > 60 else "less than a minute left"


def _cases(report: Path) -> list[ElementTree.Element]:
    try:
        return list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):  # the process was killed before it wrote all of it
        return []


def _has(case: ElementTree.Element, *kinds: str) -> bool:
    return any(case.find(kind) is not None for kind in kinds)


def _title(case: ElementTree.Element) -> str:
    module = case.get("classname", "").removeprefix("packages.").replace(".tests.", " ", 1)
    return f"{module}::{case.get('name')}"


def _shown(path: Path) -> str:
    return os.path.relpath(path)
