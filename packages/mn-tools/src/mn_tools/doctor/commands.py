"""Runs other programs so that none of them can hang or break this one, and reads the records that they write.

A record is a marked JSON object on a line of the standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MARK = "mn-doctor:"
_PATIENCE = 3.0  # seconds between asking a program to end and killing it


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program.

    Attributes:
        status: Its exit status; negative for a signal, 127 if it could not be started, ``None`` if it took too long.
        out: Its standard output.
        err: Its standard error.
    """

    status: int | None
    out: str
    err: str

    @property
    def timed_out(self) -> bool:
        """Whether it was ended after its time limit."""
        return self.status is None

    @property
    def ending(self) -> str:
        """How it ended, in a few words."""
        if self.status is None:
            return "it did not end"
        if self.status < 0:
            number = -self.status  # real-time signals have no names
            return f"signal {signal.Signals(number).name if number in set(signal.Signals) else number}"
        return f"exit status {self.status}"

    def said(self, lines: int = 4) -> str:
        """Return the first and last lines of its output for people, on either stream, at most this many."""
        text = [line.rstrip() for line in (self.out + "\n" + self.err).splitlines()]
        kept = [line for line in text if line.strip(" .-=*") and MARK not in line]
        if len(kept) > lines:
            kept[lines // 2 : len(kept) - (lines - lines // 2)] = ["..."]
        return "\n".join(kept)

    def described(self, lines: int = 4) -> str:
        """Return how it ended, and what :meth:`said` returns."""
        return f"{self.ending}\n{self.said(lines)}".strip()

    def facts(self) -> dict[str, Any]:
        """Return the content of all records together."""
        return {key: value for record in self.records() for key, value in record.items()}

    def records(self) -> list[dict[str, Any]]:
        """Return the marked JSON objects in its standard output, at any position in a line."""
        decoder = json.JSONDecoder()
        found = []
        for part in self.out.split(MARK)[1:]:
            with contextlib.suppress(ValueError):
                found.append(decoder.raw_decode(part)[0])
        return [record for record in found if isinstance(record, dict)]


def run(command: Sequence[str], seconds: float, *, text: str = "", environ: Mapping[str, str] | None = None) -> Outcome:
    """Run a program until it ends or its time is over; then end it and all processes that it started.

    Args:
        command: The program and its arguments.
        seconds: The time limit.
        text: Its standard input.
        environ: Environment variables in addition to those of this process.
    """
    # Files rather than pipes: a grandchild that outlives the program would keep a pipe open.
    with tempfile.TemporaryFile() as into, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        into.write(text.encode())
        into.seek(0)
        try:
            process = subprocess.Popen(
                command,
                stdin=into,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})},
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(127, "", str(error))
        return Outcome(_wait(process, seconds), _read(out), _read(err))


def python(module: str, seconds: float, *arguments: str) -> Outcome:
    """Run a module in a separate interpreter."""
    return run([sys.executable, "-m", module, *arguments], seconds)


def emit(*, to: int = 1, **record: object) -> None:
    """Write one record in a single call, so that records of several ranks do not mix.

    Args:
        to: The file descriptor to write to.
        record: The content.
    """
    os.write(to, f"{MARK}{json.dumps(record)}\n".encode())


@contextlib.contextmanager
def errors_as(name: str) -> Iterator[None]:
    """Write a record of this name if the block raises, with the name of a missing module, and continue after it."""
    try:
        yield
    except ModuleNotFoundError as error:
        emit(to=1, **{name: in_short(error), "missing": error.name})
    except Exception as error:
        emit(to=1, **{name: in_short(error)})


def in_short(error: BaseException) -> str:
    """Return the type and message of an exception."""
    return f"{type(error).__name__}: {error}"[:1000]


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # mpiexec ends its ranks, wherever they are
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that waits for a broken device or file system cannot be killed: it stays.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE)


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))
