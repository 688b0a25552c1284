"""The spans of a rank, as a message or a file, and merging the spans of several ranks into one trace.

The format is the JSON Object Format of "Trace Event Format", which Chrome's and Perfetto's viewers read: complete
events (``"ph": "X"``) with times in microseconds, and metadata events that name processes and threads.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mn_tools.timeline.clock import Sample, offset_at
from mn_tools.timeline.record import Event

_NO_JSON = (TypeError, ValueError, RecursionError)  # what json raises
_MAIN = "MainThread"
_BACKGROUND = "mn_comm"  # the names of the threads that communicate


@dataclass
class Part:
    """The spans that one rank has recorded.

    Attributes:
        rank: The rank.
        host: Its host.
        events: Its spans.
        threads: The names of their threads.
        dropped: How many further spans were not kept.
        full_at: When the first of these ended, in nanoseconds.
        started: Its clock and the wall clock at the same moment, in nanoseconds.
        samples: By how much its clock is ahead of rank 0's, at some times; empty if the clocks were never compared.
    """

    rank: int
    host: str
    events: Sequence[Event]
    threads: dict[int, str]
    dropped: int
    full_at: int
    started: tuple[int, int]
    samples: list[Sample]

    def to_bytes(self) -> bytes:
        """Return the part as JSON."""
        try:
            return _as_json(vars(self)).encode()
        except _NO_JSON:
            events = [(*event, details and _shown(details)) for *event, details in self.events]
            return _as_json({**vars(self), "events": events}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Part:
        """Return the part for a result of :meth:`to_bytes`.

        Raises:
            ValueError: It is something else.
        """
        try:
            fields = json.loads(text)
            fields["threads"] = {int(thread): name for thread, name in fields["threads"].items()}
            fields["samples"] = [Sample(*sample) for sample in fields["samples"]]
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"expected a part of a timeline: {error!r}") from None


def part_file(file: str, rank: int) -> str:
    """Return the file to which a rank writes its part if it cannot reach rank 0."""
    return f"{file}.rank{rank}.part"


def part_files(file: str) -> list[str]:
    """Return the files to which ranks have written their parts."""
    return sorted(glob.glob(f"{glob.escape(file)}.rank*.part"))


def write_part(file: str, part: Part) -> None:
    """Write the part of one rank.

    Raises:
        OSError: It cannot be written.
    """
    _replace(part_file(file, part.rank), iter([part.to_bytes().decode()]))


def load(file: str) -> Part:
    """Read the part of one rank.

    Raises:
        OSError: It cannot be read.
        ValueError: It is something else.
    """
    try:
        return Part.from_bytes(Path(file).read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def write(file: str, parts: Sequence[Part], notes: Sequence[str] = ()) -> None:
    """Write one trace of several parts.

    Args:
        file: The file; it is replaced when the new one is complete.
        parts: The parts of the ranks; at least one.
        notes: Further entries for the trace.

    Raises:
        OSError: It cannot be written.
    """
    parts = sorted(parts, key=lambda part: part.rank)
    base = _base_of(parts)
    _write(file, {**_about(parts), "notes": list(notes), "base": asdict(base)}, events_of(parts, base))


def add(file: str, parts: Sequence[Part]) -> None:
    """Add parts to the trace in a file; if there is none, write a new one.

    Raises:
        OSError: It cannot be read or written.
        ValueError: The file is not a trace that this module has written.
    """
    try:
        with open(file, encoding="utf-8") as content:
            trace = json.load(content)
    except FileNotFoundError:
        write(file, parts)
        return
    except ValueError as error:
        raise ValueError(f"expected a trace of CHAINERMN_TIMELINE in {file}: {error}") from None
    try:
        other, events = trace["otherData"], trace["traceEvents"]
        base = Base(tuple(other["base"]["started"]), other["base"]["begin"])
        new = [part for part in parts if part.rank not in other["ranks"]]
        about = _about(new)
        other["ranks"] = sorted(other["ranks"] + about["ranks"])
        other["clock_error_us"] |= about["clock_error_us"]
        other["placed_by_wall_clock"] += about["placed_by_wall_clock"]
        other["notes"].append(f"added later: {', '.join(f'rank {rank}' for rank in about['ranks'])}")
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected a trace of CHAINERMN_TIMELINE in {file}: {error!r}") from None
    _write(file, other, chain(events, events_of(new, base)))


@dataclass(frozen=True)
class Base:
    """The origin of the times in a trace, in nanoseconds.

    Attributes:
        started: The clock of the lowest rank and the wall clock at the same moment.
        begin: The beginning of the trace, by rank 0's clock.
    """

    started: tuple[int, int]
    begin: int


def _base_of(parts: Sequence[Part]) -> Base:
    base = Base(parts[0].started, 0)
    begins = [_clock_of(part, base)(begin) for part in parts for _, begin, *_ in part.events]
    return Base(base.started, min(begins, default=0))


def _about(parts: Sequence[Part]) -> dict[str, Any]:
    return {
        "ranks": [part.rank for part in parts],
        "clock_error_us": {str(p.rank): max(each.error for each in p.samples) / 1e3 for p in parts if p.samples},
        "placed_by_wall_clock": [part.rank for part in parts if not part.samples],
    }


def _write(file: str, other: dict[str, Any], events: Iterable[dict[str, Any]]) -> None:
    def lines() -> Iterator[str]:
        yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n'
        separator = ""
        for event in events:
            yield separator + _line_of(event)
            separator = ",\n"
        yield "\n]}\n"

    _replace(file, lines())


def _line_of(event: dict[str, Any]) -> str:
    try:
        return _as_json(event)
    except _NO_JSON:
        return _as_json({**event, "args": _shown(event["args"])})


def _as_json(value: object) -> str:
    # Viewers read no NaN and no infinity.
    return json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)


def _shown(details: dict[str, Any]) -> dict[str, Any]:
    """Return details of a span with those that JSON has no form for, such as NaN, as text."""

    def shown(value: object) -> object:
        try:
            _as_json(value)
        except _NO_JSON:
            return str(value)
        return value

    return {name: shown(value) for name, value in details.items()}


def events_of(parts: Sequence[Part], base: Base) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace, with times of rank 0's clock."""
    for part in parts:
        yield from _metadata(part)
        yield from _spans(part, base)


def _clock_of(part: Part, base: Base) -> Callable[[int], int]:
    """Return a function that converts a time of a rank's clock to nanoseconds since the beginning of the trace.

    They are whole numbers: a clock may have run for months, and a float has no nanoseconds then.
    """
    samples = part.samples
    if samples:
        return lambda at: at - offset_at(samples, at) - base.begin
    # A clock that was never compared: all ranks noted the wall clock once.
    ahead = (part.started[0] - part.started[1]) - (base.started[0] - base.started[1])
    return lambda at: at - ahead - base.begin


def _metadata(part: Part) -> Iterator[dict[str, Any]]:
    def named(kind: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": part.rank, "tid": thread, "ts": 0, "args": args}

    yield named("process_name", 0, name=f"rank {part.rank} on {part.host}")
    yield named("process_sort_index", 0, sort_index=part.rank)
    for thread, name in _rows(part).values():
        yield named("thread_name", thread, name=name)
        yield named("thread_sort_index", thread, sort_index=thread)


def _rows(part: Part) -> dict[int, tuple[int, str]]:
    """Return, for each thread, a small number and its name; the main thread first."""
    ordered = sorted(part.threads, key=lambda thread: part.threads[thread] != _MAIN)
    return {thread: (number, _called(part.threads[thread])) for number, thread in enumerate(ordered)}


def _called(name: str) -> str:
    if name == _MAIN:
        return "main thread"
    return "communication thread" if name.startswith(_BACKGROUND) else name


def _spans(part: Part, base: Base) -> Iterator[dict[str, Any]]:
    rows = _rows(part)
    clock = _clock_of(part, base)
    steps = 0
    end_of_last: int | None = None
    for name, begin, end, thread, details in part.events:
        row, _ = rows[thread]
        first, last = clock(begin), clock(end)
        args = details or {}
        if name == "step":
            if end_of_last is not None:
                yield _event(part.rank, row, "between steps", end_of_last, first, {})
            args = {"number": steps, **args}
            end_of_last = last
            steps += 1
        yield _event(part.rank, row, name, first, last, args)
    if part.dropped:
        note = f"the record is full: {part.dropped} later spans are not in it"
        where = {"pid": part.rank, "tid": 0, "ts": clock(part.full_at) / 1e3}
        yield {"name": note, "cat": "mn_comm", "ph": "i", "s": "p", **where}


def _event(rank: int, row: int, name: str, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
    found = {"name": name, "cat": "mn_comm", "ph": "X", "pid": rank, "tid": row}
    found |= {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {**found, "args": args} if args else found


def _replace(file: str, lines: Iterator[str]) -> None:
    """Write a file, and replace the old one when it is complete."""
    unfinished = f"{file}.{os.getpid()}.tmp"
    try:
        with open(unfinished, "w", encoding="utf-8") as out:
            out.writelines(lines)
        os.replace(unfinished, file)
    finally:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
