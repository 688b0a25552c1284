"""Two or more hosts on one machine, to run MPI jobs across them: for tests and benchmarks of network communication.

    python tools/cluster.py --hosts 2,2 --rate 1gbit -- python script.py

Each host is a network namespace with its own host name. A bridge connects the hosts, and its links have the requested
speed (``tc tbf``). The ``mpiexec`` beside this Python, MPICH's or Open MPI's, starts its processes there through a
stand-in for ``ssh``, and regards the hosts as different machines. Needs root, and the commands ``ip``, ``tc``,
``setsid`` and ``unshare`` (Debian: iproute2, util-linux).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SUBNET = "10.213.77"
# Gives a host its name, and its own shared memory, in the mount namespace that `ip netns exec` creates.
ENTER = 'hostname "$0"; mount -t tmpfs tmpfs /dev/shm'
# Stands in for ssh. The arguments are options, the host or its address, and a command, which outlives this one.
SSH = f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
case $host in {SUBNET}.*) host=node${{host##*.}};; esac
exec setsid --fork --wait ip netns exec "$PREFIX-$host" unshare --uts sh -c '{ENTER}; eval "$*"' "$host" "$@"
"""
_END_SECONDS = 5.0  # the time for killed processes to end
_numbers = itertools.count()


def main() -> int:
    """Run a command across hosts; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,2", help="the number of ranks on each host, for example 2,1")
    parser.add_argument(
        "--rate", default="", help="the speed of each host's link, in the notation of tc: 1gbit; default: no limit"
    )
    parser.add_argument("--mpiexec", default="mpiexec", help="the launcher, with its options")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    missing = what_is_missing()
    if missing:
        print(f"no virtual cluster here: {missing}", file=sys.stderr)
        return 77
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    ranks = [int(n) for n in args.hosts.split(",")]
    return run(ranks, command, rate=args.rate, launcher=shlex.split(args.mpiexec)).returncode


def what_is_missing() -> str:
    """Return why there can be no virtual cluster here, or an empty string."""
    for tool in ("ip", "tc", "unshare", "setsid"):
        if shutil.which(tool) is None:
            return f"there is no command {tool}"
    probe = f"mn{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces may not be made: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


def run(
    ranks: Sequence[int],
    command: Sequence[str],
    *,
    rate: str = "",
    launcher: Sequence[str] = ("mpiexec",),
    **options: object,
) -> subprocess.CompletedProcess:
    """Run a command on the given number of ranks on each host.

    Args:
        ranks: The number of ranks on each host.
        command: The command.
        rate: The speed of each host's link, in the notation of ``tc``; empty for no limit.
        launcher: MPICH's or Open MPI's ``mpiexec``, and its options.
        options: Passed to ``subprocess.run``.

    Returns:
        The finished job.
    """
    with cluster(len(ranks), rate) as hosts, hosts.knowing_each_other():
        where = ",".join(f"{name}:{n}" for name, n in zip(hosts.names, ranks, strict=True))
        mpiexec = shutil.which(launcher[0], path=os.path.dirname(sys.executable)) or launcher[0]
        job = [mpiexec, *launcher[1:], *_on_hosts(mpiexec, where), "-n", str(sum(ranks)), *command]
        # mpiexec itself runs on the first host, so that its agents can connect to it.
        there = hosts.command_on(hosts.names[0], job)
        return subprocess.run(there, env=hosts.environ, **options)  # type: ignore[call-overload,no-any-return]


def _on_hosts(mpiexec: str, where: str) -> list[str]:
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=True).stdout
    return ["-hosts" if "HYDRA" in version else "--host", where]


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Hosts on this machine.

    Attributes:
        names: Their names: ``node1`` and so on. Open MPI regards two names as one if they are equal up to a dot.
        ssh: The command that reaches them, as ``ssh`` reaches other machines.
        environ: The environment that makes ``mpiexec`` use this command, and the links of the hosts.
        prefix: The beginning of the names of their network namespaces.
    """

    names: tuple[str, ...]
    ssh: Path
    environ: Mapping[str, str]
    prefix: str

    def command_on(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs a given command on a host, and ends when that ends."""
        return [*self._in(name), "unshare", "--uts", "sh", "-c", f'{ENTER}; exec "$@"', name, *command]

    def addresses(self) -> dict[str, str]:
        """Return the address of each host."""
        return {name: f"{SUBNET}.{number}" for number, name in enumerate(self.names, 1)}

    @contextlib.contextmanager
    def knowing_each_other(self) -> Iterator[None]:
        """Let hosts look up each other's names: ``ip netns exec`` replaces ``/etc/hosts`` by a file for the host."""
        folders = [Path("/etc/netns", self._namespace(name)) for name in self.names]
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.addresses().items()), ""]
        try:
            for folder in folders:
                folder.mkdir(parents=True)
                (folder / "hosts").write_text("\n".join(lines))
            yield
        finally:
            for folder in folders:  # but not the one that contains them: another job may be about to use it
                shutil.rmtree(folder, ignore_errors=True)

    def cut(self, name: str) -> None:
        """Cut the link of a host: nothing reaches it or comes from it, and no process is notified."""
        _ip("link", "set", f"{self.prefix}v{self.names.index(name)}", "nomaster")

    def processes(self, name: str) -> list[int]:
        """Return the ids of all processes on a host."""
        found = subprocess.run(["ip", "netns", "pids", self._namespace(name)], capture_output=True, text=True)
        return list(map(int, found.stdout.split()))

    def kill(self, name: str) -> None:
        """End every process on a host."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            found = self.processes(name)
            if not found:
                return
            for process in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def _namespace(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def _in(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self._namespace(name)]


@contextlib.contextmanager
def cluster(number: int, rate: str = "") -> Iterator[Hosts]:
    """Create hosts, and yield them; afterwards, remove them, and kill all processes on them.

    Args:
        number: The number of hosts.
        rate: The speed of each host's link, in the notation of ``tc``; empty for no limit.
    """
    prefix = f"mn{os.getpid()}x{next(_numbers)}"  # the kernel needs time to remove earlier ones
    with contextlib.ExitStack() as undo:
        ssh = Path(undo.enter_context(tempfile.TemporaryDirectory()), "ssh")
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        environ = {**os.environ, **_one_network(), "PREFIX": prefix, "OMP_NUM_THREADS": "1"}
        environ |= {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(ssh), "PRTE_MCA_plm_ssh_agent": str(ssh)}
        # Each host seems to have all cores to itself. Open MPI would bind the ranks of each host to the same few cores,
        # where one rank that polls can keep another one from running for many seconds; and no rank would yield.
        environ["PRTE_MCA_hwloc_default_binding_policy"] = "none"
        environ["OMPI_MCA_mpi_yield_when_idle"] = "1"
        # With this variable, Open MPI starts all processes on the first host.
        environ.pop("PRTE_MCA_rmaps_default_mapping_policy", None)
        hosts = Hosts(tuple(f"node{i + 1}" for i in range(number)), ssh, environ, prefix)
        bridge = f"{prefix}b"
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        for i, name in enumerate(hosts.names):
            _add_host(prefix, i, bridge, rate, undo)
            undo.callback(hosts.kill, name)
        yield hosts


def _add_host(prefix: str, i: int, bridge: str, rate: str, undo: contextlib.ExitStack) -> None:
    host, outer = f"{prefix}-node{i + 1}", f"{prefix}v{i}"
    _ip("netns", "add", host)
    undo.callback(_ip, "netns", "del", host)
    _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", host)
    _ip("link", "set", outer, "master", bridge, "up")
    _ip("-n", host, "addr", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
    _ip("-n", host, "link", "set", "eth0", "up")
    _ip("-n", host, "link", "set", "lo", "up")
    if rate:
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run(["ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "eth0", *shape], check=True)


def _one_network() -> dict[str, str]:
    """Return the variables that make MPI (and Gloo, in the benchmarks) use the hosts' links."""
    found = {"UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp,self", "FI_TCP_IFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    return {**found, "HYDRA_IFACE": "eth0"}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
