"""The command that starts an attempt, and the hosts that remain for it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import compress

from mn_elastic.supervision.options import Host, Options
from mn_elastic.support import SPARES
from mn_guard.supervised import start
from mn_guard.supervised.link import VARIABLE
from mn_tools.doctor.mpi import Launcher

_PROBE_SECONDS = 2.5
# This connects back, because it is not enough that a host can be reached from here.
_PROBE = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()"


def command_of(options: Options, launcher: Launcher, hosts: Sequence[Host]) -> list[str]:
    """Return the command line that starts ranks and spares on some hosts; if there are none, on this host."""
    ranks = ["-n", str(ranks_on(options, hosts) + spares_on(options, hosts))]
    script = [sys.executable, os.path.abspath(start.__file__), *options.command]
    mpiexec = [launcher.path, *options.mpiexec[1:]]
    listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    if launcher.family != "Open MPI":
        where = ["-hosts", listed] if hosts else []
        return [*mpiexec, *ranks, *where, *script]
    # Otherwise, a rank that reads its standard input waits forever: this mpiexec does not pass on that it is empty.
    no_input = [] if "--stdin" in mpiexec else ["--stdin", "none"]
    fault_tolerance = ["--with-ft", "ulfm", *_detector(options.detect)]
    where = ["--host", listed, "-x", VARIABLE, "-x", SPARES] if hosts else []
    return [*mpiexec, *no_input, *fault_tolerance, *ranks, *where, *script]


def remove_session(process: int) -> None:
    """Remove the folder that Open MPI's launcher has for its sockets, and leaves behind if it is killed.

    Args:
        process: The process ID of the launcher, which has ended, as have its ranks on this host.
    """
    shutil.rmtree(os.path.join(tempfile.gettempdir(), f"ompi.{process}"), ignore_errors=True)


def _detector(seconds: float | None) -> list[str]:
    """Return the options of Open MPI's failure detector, for which a thread of each rank sends signs of life."""
    if seconds is None:
        return []
    # The detector expects a time-out of more than three periods.
    settings = {"": "true", "_thread": "true", "_period": f"{seconds / 4:g}", "_timeout": f"{seconds:g}"}
    return [word for name, value in settings.items() for word in ("--mca", f"mpi_ft_detector{name}", value)]


def environment_of(options: Options, hosts: Sequence[Host]) -> Mapping[str, str]:
    """Return the variables for the number of spares, and for either launcher to reach hosts as the supervisor does."""
    environ = {SPARES: str(spares_on(options, hosts))}
    if options.ssh == ("ssh",):
        return environ
    command = shlex.join(options.ssh)
    return environ | {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": command, "PRTE_MCA_plm_ssh_agent": command}


def ranks_on(options: Options, hosts: Iterable[Host]) -> int:
    """Return how many ranks can be started: the requested number, if there is room."""
    return min(options.ranks, _room(hosts)) if options.hosts else options.ranks


def spares_on(options: Options, hosts: Iterable[Host]) -> int:
    """Return how many spares can be started: the requested number, if the ranks leave room."""
    hosts = tuple(hosts)
    return min(options.spares, _room(hosts) - ranks_on(options, hosts)) if options.hosts else options.spares


def _room(hosts: Iterable[Host]) -> int:
    return sum(host.slots for host in hosts)


def reachable(options: Options, address: tuple[str, int]) -> tuple[Host, ...]:
    """Return the hosts that can be reached now, and can reach the supervisor.

    Args:
        options: The hosts, and how to reach them.
        address: The supervisor's address.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(options.hosts))) as pool:
        answers = pool.map(lambda host: _answers(options, host, address), options.hosts)
        return tuple(compress(options.hosts, answers))


def left(options: Options, address: tuple[str, int], silent: Iterable[str] = ()) -> tuple[Host, ...]:
    """Return the hosts that can be reached; silent hosts are asked only if the others have too little room.

    Args:
        options: The hosts, and how to reach them.
        address: The supervisor's address.
        silent: The hosts that have become silent, by the names that they use for themselves. Asking them takes seconds.
    """
    passed_over = {_named(name, options.hosts) for name in silent}
    others = replace(options, hosts=tuple(host for host in options.hosts if host not in passed_over))
    found = reachable(others, address)
    if others == options or ranks_on(options, found) >= options.least:
        return found
    return reachable(options, address)


def _named(name: str, hosts: Sequence[Host]) -> Host | None:
    """Return the host that uses a name for itself; ``None`` if there is no such host, or there are several."""
    found = [host for host in hosts if _without_user(host).partition(".")[0] == name.partition(".")[0]]
    return found[0] if len(found) == 1 else None


def _without_user(host: Host) -> str:
    return re.sub(r"^.*@", "", host.name)


def _answers(options: Options, host: Host, address: tuple[str, int]) -> bool:
    probe = [sys.executable, "-c", _PROBE, address[0], str(address[1])]
    command = probe if _is_here(host) else [*options.ssh, host.name, shlex.join(probe)]
    nothing = subprocess.DEVNULL
    try:
        done = subprocess.run(command, timeout=_PROBE_SECONDS, stdin=nothing, stdout=nothing, stderr=nothing)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _is_here(host: Host) -> bool:
    return host.name in ("localhost", socket.gethostname())


def own_address(hosts: Iterable[Host]) -> str:
    """Return the address at which other hosts can reach this one; hosts whose names do not resolve are passed over.

    Args:
        hosts: The hosts, which may include this one.

    Raises:
        SystemExit: There are other hosts, and none of their names resolves.
    """
    others = [host for host in hosts if not _is_here(host)]
    if not others:
        return "127.0.0.1"
    for host in reversed(others):  # the first is often this one, by another name
        address = _address_towards(_without_user(host))
        if address is not None:
            return address
    names = ", ".join(host.name for host in others)
    raise SystemExit(f"expected at least one host in --hosts whose name leads to an IPv4 address, got {names}")


def _address_towards(name: str) -> str | None:
    """Return the address from which this host reaches another; ``None`` if there is no such host, or no route."""
    # This sends nothing: it only asks the kernel for the route.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((name, 9))
        except (OSError, UnicodeError):  # Python cannot encode some names
            return None
        return str(probe.getsockname()[0])
