"""The command line of the doctor."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """The settings of one examination.

    Attributes:
        ranks: How many ranks are started on this host.
        hosts: Other hosts, or this one by name, that a job is to run on.
        ssh: The command that reaches a host, and its options.
        seconds: How long each step may take.
        json: Whether to write JSON.
        fix: Whether to fix problems that can be fixed safely.
    """

    ranks: int = 2
    hosts: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ("ssh",)
    seconds: float = 60.0
    json: bool = False
    fix: bool = False


def parse(arguments: list[str], prog: str, description: str) -> Options:
    """Read the command line; ends the process, as argparse does, if it is wrong."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks to start; default %(default)s")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", help="other hosts to check, separated by commas")
    where.add_argument("--hostfile", type=Path, help="a hostfile for mpiexec with the hosts to check")
    parser.add_argument("--ssh", default="ssh", help="the command that reaches a host; default %(default)s")
    parser.add_argument("--timeout", type=float, default=60.0, help="time limit for each step in seconds; default 60")
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument("--fix", action="store_true", help="remove shared memory and folders that ended jobs have left")
    given = parser.parse_args(arguments)
    if given.ranks < 1:
        parser.error(f"expected 1 or more for --ranks, got {given.ranks}")
    if not 0 < given.timeout < float("inf"):
        parser.error(f"expected a number of seconds above 0 for --timeout, got {given.timeout}")
    try:
        ssh = tuple(shlex.split(given.ssh))
    except ValueError as error:
        parser.error(f"cannot read --ssh {given.ssh}: {error}")
    if not ssh:
        parser.error("expected a command for --ssh, got none")
    try:
        hosts = read_hostfile(given.hostfile.read_text()) if given.hostfile else _hosts((given.hosts or "").split(","))
    except (OSError, ValueError) as error:
        parser.error(f"cannot read the file of hosts: {error}")
    if not hosts and (given.hostfile or given.hosts is not None):
        parser.error(f"expected hosts in {given.hostfile or '--hosts'}, got none")
    return Options(given.ranks, hosts, ssh, given.timeout, given.json, given.fix)


def read_hostfile(text: str) -> tuple[str, ...]:
    """Return the hosts in a file for MPICH (``host:4``) or Open MPI (``host slots=4``), each once."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return _hosts(words[0] for words in lines if words)


def _hosts(words: Iterable[str]) -> tuple[str, ...]:
    """Return the hosts without their numbers of ranks, each once."""
    # An IPv6 address has more than one colon.
    hosts = (re.sub(r"^([^:]+):\d+$", r"\1", word.strip()) for word in words)
    return tuple(dict.fromkeys(filter(None, hosts)))
