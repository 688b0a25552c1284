"""The results of checks: lines for people, and JSON objects for programs."""

from __future__ import annotations

import enum
import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = 1
_NARROWEST, _WIDEST = 60, 110
_INDENT = 28


class Status(enum.Enum):
    """The result of a check, from good to bad."""

    OK = "OK"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Check:
    """A check and its result.

    Attributes:
        group: The heading under which it is printed.
        name: What was checked.
        status: The result.
        found: The observation.
        code: The name of the problem, which stays the same from release to release; empty if there is none.
        advice: What to do; empty if there is no problem.
    """

    group: str
    name: str
    status: Status
    found: str
    code: str = ""
    advice: str = ""


def ok(group: str, name: str, found: str) -> Check:
    """Return a check that found no problem."""
    return Check(group, name, Status.OK, found)


class Catalogue:
    """All problems that have a name; every check that is not OK is created by a catalogue.

    Args:
        failures: The advice for each failure, by code; a format string.
        warnings: The same for warnings.
    """

    def __init__(self, failures: Mapping[str, str], warnings: Mapping[str, str]) -> None:
        self._failures = dict(failures)
        self._advice = {**failures, **warnings}

    @property
    def codes(self) -> frozenset[str]:
        """The codes of all problems."""
        return frozenset(self._advice)

    def __call__(self, code: str, group: str, name: str, found: str, **values: object) -> Check:
        """Return a check that found a problem.

        Args:
            code: The problem.
            group: The heading.
            name: What was checked.
            found: The observation.
            values: The values for the advice, besides ``python``, this interpreter.
        """
        status = Status.FAILURE if code in self._failures else Status.WARNING
        advice = self._advice[code].format(**{"python": sys.executable, **values})
        return Check(group, name, status, found, code, advice)


def worst(checks: Iterable[Check]) -> Status:
    """Return the worst status among checks; OK if there are none."""
    return max((check.status for check in checks), key=list(Status).index, default=Status.OK)


def as_text(check: Check, columns: int | None = None) -> str:
    """Return a check as lines that end with a line feed.

    Args:
        check: The check.
        columns: The maximum width of lines; by default the width of the terminal, within limits.
    """
    width = min(max(columns or shutil.get_terminal_size((80, 24)).columns, _NARROWEST), _WIDEST)
    head = f"  {check.status.value:<8} {check.name:<{_INDENT - 12}} "
    code = f" [{check.code}]" if check.code else ""
    lines = _wrap(head, " " * _INDENT, check.found + code, width)
    if check.advice:
        lines += _wrap(" " * _INDENT + "-> ", " " * (_INDENT + 3), check.advice, width)
    return "".join(f"{line}\n" for line in lines)


def summary(checks: Sequence[Check]) -> str:
    """Return the last line: how many checks had which result."""
    counts = Counter(check.status for check in checks)
    bad = [f"{counts[each]} {each.value}{'s' * (counts[each] != 1)}" for each in (Status.WARNING, Status.FAILURE)]
    return f"{counts[Status.OK]} OK, {', '.join(bad)}\n"


def as_json(checks: Sequence[Check], settings: Mapping[str, Any]) -> str:
    """Return all checks as one JSON object, in the form that :mod:`mn_tools.doctor` describes."""
    found = [
        asdict(check)
        | {"status": check.status.value.lower(), "code": check.code or None, "advice": check.advice or None}
        for check in checks
    ]
    whole = {"format": FORMAT, "status": worst(checks).value.lower(), **settings, "checks": found}
    return json.dumps(whole, indent=2) + "\n"


def _wrap(first: str, later: str, text: str, width: int) -> list[str]:
    """Break a text into lines; its own line breaks stay, and paths are never broken."""
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        lines += textwrap.wrap(
            paragraph,
            width,
            initial_indent=later if lines else first,
            subsequent_indent=later,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines
