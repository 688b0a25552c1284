"""Other hosts: whether they can be found and reached, and have the same Python and packages as this one."""

from __future__ import annotations

import inspect
import ipaddress
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from typing import Any

from mn_tools.doctor import commands, inventory
from mn_tools.doctor.mpi import Launcher
from mn_tools.doctor.options import Options
from mn_tools.doctor.problems import problem
from mn_tools.doctor.report import Check, ok

_HELPERS = {"MPICH": "hydra_pmi_proxy", "Open MPI": "prted"}
# Messages of ssh (exit status 255), and their causes.
_COMPLAINTS = {
    r"Could not resolve hostname|Name or service not known": "host-unresolved",
    r"Host key verification failed|REMOTE HOST IDENTIFICATION": "ssh-host-key",
    r"Permission denied|password|Too many authentication": "ssh-password",
}

Inventory = dict[str, Any]


def check(options: Options, launcher: Launcher | None) -> Iterator[Check]:
    """Check every host, and compare it with this one.

    Args:
        options: The hosts, and how to reach them.
        launcher: The launcher on this host, whose helper every host needs; ``None`` if there is none.
    """
    helper = _helper(launcher)
    own = inventory.take(helper, [])
    yield from check_own_name(str(own["host"]), inventory.resolve(str(own["host"])))
    for host in options.hosts:
        yield from _check_host(host, options, helper, own)


def check_own_name(name: str, address: str) -> Iterator[Check]:
    """Check the address of this host's own name, which other hosts use to connect to it."""
    if address and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        yield problem(
            "own-name-loopback", "Hosts", name, f"this host's own name stands for {address}, on this host alone"
        )


def _check_host(host: str, options: Options, helper: str, own: Inventory) -> Iterator[Check]:
    group = f"Host {host}"
    address = inventory.resolve(host)
    # A launch agent may know names that the system cannot resolve.
    if not address and options.ssh == ("ssh",):
        yield problem("host-unresolved", group, "name", f"{host} has no address here")
        return
    yield ok(group, "name", f"{host} is {address}" if address else f"{host} is known to {options.ssh[0]} alone")
    if _is_here(address):
        yield ok(group, "same Python", "it is this host")
        return
    names = [own["host"], *(other for other in options.hosts if other != host)]
    command = reach(host, options, [sys.executable, "-", helper, *names])
    outcome = commands.run(command, options.seconds, text=inspect.getsource(inventory))
    seen = next(iter(outcome.records()), None)
    if seen is None:
        yield _not_reached(group, host, command, outcome)
        return
    yield ok(group, "ssh", f"it answers without a password, as {seen['host']}")
    yield _compare_python(group, own, seen)
    yield _compare_packages(group, own, seen)
    if not seen["helper"]:
        yield problem("host-launcher-missing", group, "launcher", f"{helper} is not there")
    unknown = [name for name, found in seen["resolved"].items() if not found]
    if unknown and address:
        yield problem("host-resolves-not", group, "names there", f"{', '.join(unknown)} unknown there", host=host)


def reach(host: str, options: Options, command: list[str]) -> list[str]:
    """Return the command that runs another command on a host."""
    settings = ["-oBatchMode=yes", f"-oConnectTimeout={max(1, int(min(options.seconds, 10)))}"]
    return [*options.ssh, *settings, host, shlex.join(command)]


def _not_reached(group: str, host: str, command: list[str], outcome: commands.Outcome) -> Check:
    values = {"host": host, "command": shlex.join([*command[:-1], "true"])}
    said = outcome.said()
    if outcome.timed_out:
        return problem("ssh-hangs", group, "ssh", f"no answer in time\n{said}".strip(), **values)
    if outcome.status == 127 and "No such file or directory" in said and command[0] in said:
        return problem("ssh-missing", group, "ssh", f"{command[0]} is not on PATH", **values)
    if outcome.status in (126, 127):  # a shell's, for a command that cannot be run
        return problem("host-python-missing", group, "same Python", said or outcome.ending, **values)
    if outcome.status == 255:
        code = next((code for complaint, code in _COMPLAINTS.items() if re.search(complaint, said)), "ssh-unreachable")
        return problem(code, group, "ssh", said or outcome.ending, **values)
    return problem("host-python-fails", group, "same Python", outcome.described(), **values)


def _compare_python(group: str, own: Inventory, seen: Inventory) -> Check:
    if seen["python"] != own["python"]:
        found = f"{seen['python']}, here {own['python']}"
        return problem("host-python-differs", group, "same Python", found)
    return ok(group, "same Python", f"{seen['python']} at {sys.executable}")


def _compare_packages(group: str, own: Inventory, seen: Inventory) -> Check:
    missing = [name for name in own["modules"] if name not in seen["modules"]]
    missing += [name for name in own["packages"] if name not in seen["packages"] and name not in missing]
    if missing:
        return problem("host-package-missing", group, "same packages", f"not there: {', '.join(missing)}")
    pairs = {name: (seen["packages"][name], version) for name, version in own["packages"].items()}
    others = [f"{name} {there}, here {here}" for name, (there, here) in sorted(pairs.items()) if there != here]
    if others:
        return problem("host-package-differs", group, "same packages", "; ".join(others))
    return ok(group, "same packages", ", ".join(f"{name} {here}" for name, (_, here) in sorted(pairs.items())))


def _helper(launcher: Launcher | None) -> str:
    """Return the path of the program that a launcher starts on other hosts; empty if it is not known."""
    name = _HELPERS.get(launcher.family) if launcher else None
    path = os.path.join(os.path.dirname(launcher.path), name) if launcher and name else ""
    return path if os.path.exists(path) else ""


def _is_here(address: str) -> bool:
    """Return whether an address belongs to this host: only then can a socket be bound to it."""
    if not address:
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address.partition("%")[0], 0))
    except OSError:
        return False
    return True
