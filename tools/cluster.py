"""Two or more hosts on one machine, to run MPI jobs across them: for tests and benchmarks of network communication.

    python tools/cluster.py --hosts 2,2 --rate 1gbit -- python script.py

Each host is a network namespace with its own host name. A bridge connects the hosts, and its links have the given speed
(``tc tbf``). MPICH's ``mpiexec`` starts its processes there through a launch agent, and treats the hosts as different
machines. Needs root, and the commands ``ip``, ``tc`` and ``unshare`` (Debian: iproute2, util-linux).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SUBNET = "10.213.77"
AGENT = """#!/bin/sh
# Started by mpiexec as ssh would be: options, the host, and the command to run there.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$PREFIX-$host" unshare --uts sh -c 'hostname "$0"; eval "$*"' "$PREFIX-$host" "$@"
"""


def main() -> int:
    """Run a command across hosts; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,2", help="how many ranks each host has, for instance 2,1")
    parser.add_argument(
        "--rate", default="", help="how fast each host's link is, as tc writes it: 1gbit; default: no limit"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    missing = what_is_missing()
    if missing:
        print(f"no virtual cluster here: {missing}", file=sys.stderr)
        return 77
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return run([int(n) for n in args.hosts.split(",")], command, rate=args.rate).returncode


def what_is_missing() -> str:
    """Return why there can be no virtual cluster here, or an empty string."""
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no command {tool}"
    probe = f"mn{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces may not be made: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


def run(
    ranks: Sequence[int], command: Sequence[str], *, rate: str = "", **options: object
) -> subprocess.CompletedProcess:
    """Run a command on the given number of ranks on each host.

    Args:
        ranks: How many ranks each host has.
        command: The command; its Python's environment must contain MPICH.
        rate: The speed of each host's link, in the notation of ``tc``; empty for no limit.
        options: Passed to ``subprocess.run``.

    Returns:
        The finished job.
    """
    with cluster(len(ranks), rate) as (prefix, agent):
        addresses = ",".join(f"{SUBNET}.{i + 1}:{n}" for i, n in enumerate(ranks))
        mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
        # mpiexec itself runs on the first host, so that its agents can call back.
        here = ["ip", "netns", "exec", f"{prefix}-{SUBNET}.1", "unshare", "--uts"]
        there = [mpiexec, "-launcher", "ssh", "-launcher-exec", str(agent), "-iface", "eth0", "-hosts", addresses]
        shell = 'hostname "$0"; exec "$@"'
        environ = {**os.environ, "PREFIX": prefix, "OMP_NUM_THREADS": "1", **_one_network()}
        job = [*here, "sh", "-c", shell, f"{prefix}-{SUBNET}.1", *there, "-n", str(sum(ranks)), *command]
        return subprocess.run(job, env=environ, **options)  # type: ignore[call-overload,no-any-return]


@contextlib.contextmanager
def cluster(hosts: int, rate: str) -> Iterator[tuple[str, Path]]:
    """Create hosts, and yield the prefix of their names and the launch agent; the hosts are removed at the end."""
    prefix = f"mn{os.getpid()}"
    with contextlib.ExitStack() as undo, tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent"
        agent.write_text(AGENT)
        agent.chmod(0o755)
        bridge = f"{prefix}b"
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        for i in range(hosts):
            _add_host(prefix, i, bridge, rate, undo)
        yield prefix, agent


@contextlib.contextmanager
def known_to_each_other(names: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
    """Let hosts resolve names: ``ip netns exec`` uses these files in place of those of /etc.

    Args:
        names: For each host, by its network namespace, the addresses of the names that it can resolve.
    """
    folders = {Path("/etc/netns") / host: known for host, known in names.items()}
    try:
        for folder, known in folders.items():
            folder.mkdir(parents=True)
            lines = [f"{address} {name}" for name, address in known.items()]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        yield
    finally:
        for folder in folders:
            (folder / "hosts").unlink(missing_ok=True)
            folder.rmdir()
        with contextlib.suppress(OSError):  # it existed before, or another job uses it
            Path("/etc/netns").rmdir()


def _add_host(prefix: str, i: int, bridge: str, rate: str, undo: contextlib.ExitStack) -> None:
    address = f"{SUBNET}.{i + 1}"
    host, outer = f"{prefix}-{address}", f"{prefix}v{i}"
    _ip("netns", "add", host)
    undo.callback(_ip, "netns", "del", host)
    _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", host)
    _ip("link", "set", outer, "master", bridge, "up")
    _ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", host, "link", "set", "eth0", "up")
    _ip("-n", host, "link", "set", "lo", "up")
    if rate:
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run(["ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "eth0", *shape], check=True)


def _one_network() -> dict[str, str]:
    """Return the variables that make MPICH (and Gloo, in the benchmarks) use the hosts' links."""
    return {"UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp,self", "FI_TCP_IFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
