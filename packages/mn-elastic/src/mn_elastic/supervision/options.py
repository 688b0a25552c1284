"""The command line of the supervisor."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass

_LEAST_DETECT = 0.5


@dataclass(frozen=True)
class Host:
    """A host on which ranks can be started.

    Attributes:
        name: The name by which it is reached.
        slots: The maximum number of ranks on it.
    """

    name: str
    slots: int


@dataclass(frozen=True)
class Options:
    """The settings of a job.

    Attributes:
        ranks: How many ranks train, if there is room.
        command: The script and its arguments.
        hosts: The hosts; if empty, this host.
        least: The minimum number of ranks.
        restarts: The maximum number of restarts.
        ssh: The command that reaches a host, with its options.
        mpiexec: The launcher, with its options.
        start_limit: The maximum number of seconds until all ranks have a communicator.
        spares: How many additional processes wait to take the places of lost ranks.
        detect: The number of seconds of silence after which a rank counts as dead; ``None`` for never.
    """

    ranks: int
    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    least: int = 1
    restarts: int = 3
    ssh: tuple[str, ...] = ("ssh",)
    mpiexec: tuple[str, ...] = ("mpiexec",)
    start_limit: float = 120.0
    spares: int = 0
    detect: float | None = None


def parse(arguments: list[str], prog: str, description: str) -> Options:
    """Read the command line; ends the process, as argparse does, if it is wrong."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-n", type=int, required=True, metavar="RANKS", help="how many ranks to start")
    parser.add_argument("--hosts", help="the hosts: a:2,b:2 for two ranks on each; default: this host")
    parser.add_argument("--min", type=int, default=1, help="the minimum number of ranks to start; default %(default)s")
    parser.add_argument(
        "--spares",
        type=int,
        default=0,
        help="how many additional processes wait until a rank is lost (Open MPI, elastic=True); default 0",
    )
    parser.add_argument(
        "--detect",
        type=float,
        metavar="SECONDS",
        help="after how long a rank that is stopped or cut off counts as dead, at least 0.5; more than half of the "
        "ranks must then remain after each loss (experimental; Open MPI, elastic=True); default: never",
    )
    parser.add_argument("--restart", type=int, default=3, help="the maximum number of restarts; default %(default)s")
    parser.add_argument("--ssh", default="ssh", help="the command that reaches a host; default %(default)s")
    parser.add_argument("--mpiexec", default="mpiexec", help="the launcher, with its options")
    parser.add_argument(
        "--start-limit",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="after how long ranks that do not all have a communicator are ended and started again; default 120",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its arguments, or -m and a module")
    given = parser.parse_args(arguments)
    command = tuple(given.command[1:] if given.command[:1] == ["--"] else given.command)
    if not command or ":" in command:  # after which mpiexec would expect another program
        parser.error(f"expected a script to run, got {'several, separated by :' if command else 'none'}")
    if not 1 <= given.min <= given.n:
        parser.error(f"expected 1 <= --min <= -n, got --min {given.min} and -n {given.n}")
    for name in ("restart", "spares"):
        if getattr(given, name) < 0:
            parser.error(f"expected 0 or more for --{name}, got {getattr(given, name)}")
    if given.detect is not None and not _LEAST_DETECT <= given.detect < float("inf"):
        parser.error(f"expected at least {_LEAST_DETECT} seconds for --detect, got {given.detect}")
    try:
        hosts = () if given.hosts is None else read_hosts(given.hosts, given.n + given.spares)
        ssh, mpiexec = (_words(name, getattr(given, name)) for name in ("ssh", "mpiexec"))
    except ValueError as error:
        parser.error(str(error))
    if hosts and sum(host.slots for host in hosts) < given.min:
        parser.error(f"expected room for at least {given.min} ranks on --hosts, got {given.hosts}")
    return Options(
        given.n, command, hosts, given.min, given.restart, ssh, mpiexec, given.start_limit, given.spares, given.detect
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text}")
    return seconds


def _words(name: str, text: str) -> tuple[str, ...]:
    """Return the command and the options that an option consists of."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"expected a command for --{name}, got {text!r}: {error}") from None
    if not words:
        raise ValueError(f"expected a command for --{name}, got {text!r}")
    return words


def read_hosts(text: str, processes: int) -> tuple[Host, ...]:
    """Return the hosts of a list such as ``a:2,b:2``; without a number, a host gets an equal share of the processes."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"expected hosts as a:2,b:2 for --hosts, got {text!r}")
    hosts = []
    for name in names:
        match = re.fullmatch(r"([^:]+)(?::([1-9]\d*))?", name)
        if match is None:
            raise ValueError(f"expected hosts as a:2,b:2 for --hosts, got {name!r}")
        hosts.append(Host(match[1], int(match[2] or -(-processes // len(names)))))
    if len({host.name for host in hosts}) < len(hosts):
        raise ValueError(f"expected each host once in --hosts, got {text!r}")
    return tuple(hosts)
