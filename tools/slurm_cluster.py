"""Slurm on one machine: a controller and two or more nodes, for tests.

    python tools/slurm_cluster.py --nodes 2 -- srun --mpi=pmi2 --nodes=2 python script.py

Each node, and the host of the controller, is a virtual host of tools/cluster.py: it has its own name and network, and
runs its own ``slurmd``. All files of Slurm are in a temporary folder. The command runs on the controller's host, in the
working directory; every process on the virtual hosts is killed when it ends. Needs root, what tools/cluster.py needs,
and Slurm and munge (Debian: slurm-wlm, munge). Ends with status 77 if something is missing; ``--check`` only prints
the reason, or nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cluster

CANNOT = 77
COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_START_SECONDS = 60.0
_PERIOD = 0.1  # between two looks
# Debian puts the daemons there, and users' paths often lack it.
_SBIN = "/usr/sbin"
_CONF = """\
ClusterName=virtual
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
# The nodes share /tmp, where the PMIx servers of a step would meet.
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# Neither needs control groups.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# The nodes have as many cores as the configuration says, whatever the machine has.
SlurmdParameters=config_overrides
MpiDefault=none
# A node that does not answer is soon regarded as lost.
SlurmdTimeout={patience}
# So that jobs that wait are soon looked at.
SchedulerParameters=sched_interval=2,sched_min_interval=100000,batch_sched_delay=1
KillWait={grace}
ReturnToService=2
JobRequeue=1
NodeName={nodes} CPUs={cores} Boards=1 SocketsPerBoard=1 CoresPerSocket={cores} ThreadsPerCore=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def main() -> int:
    """Run a command in a Slurm cluster; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--cores", type=int, default=16, help="the cores that each node claims to have; %(default)s")
    parser.add_argument("--check", action="store_true", help="only say why there can be no cluster here")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    missing = what_is_missing()
    if missing:
        print(f"no Slurm cluster here: {missing}")
        return CANNOT
    if args.check:
        return 0
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    with slurm(args.nodes, args.cores) as found:
        return found.run(command).returncode


def what_is_missing() -> str:
    """Return why there can be no Slurm cluster here, or an empty string."""
    if os.geteuid() != 0:
        return "it needs root"
    for command in COMMANDS:
        if shutil.which(command, path=_path()) is None:
            return f"there is no command {command}"
    return cluster.what_is_missing()


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A Slurm cluster.

    Attributes:
        hosts: The hosts: the nodes, and the one of the controller.
        nodes: The names of the nodes.
        environ: The environment in which Slurm's commands find the cluster.
        folder: The folder of Slurm's files, with the logs of its daemons.
        daemons: The processes of the daemons, which end with the hosts.
    """

    hosts: cluster.Hosts
    nodes: tuple[str, ...]
    environ: Mapping[str, str]
    folder: Path
    daemons: list[subprocess.Popen]

    def run(self, command: Sequence[str], **options: object) -> subprocess.CompletedProcess:
        """Run a command on the controller's host; ``options`` are those of ``subprocess.run``."""
        here = self.hosts.command_on(self.hosts.names[-1], command)
        return subprocess.run(here, **{"env": self.environ, **options})  # type: ignore[call-overload,no-any-return]

    def start_node(self, name: str) -> None:
        """Start the ``slurmd`` of a node, for example after ``hosts.kill(name)``."""
        self.start(name, ["slurmd", "-D", "-N", name])

    def wait_for_nodes(self) -> None:
        """Wait until all nodes are idle, or raise."""
        deadline = time.monotonic() + _START_SECONDS
        states: list[str] = []
        while states != ["idle"] * len(self.nodes):
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-1000:] for path in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"expected {len(self.nodes)} idle nodes, got {states}:\n{logs}")
            time.sleep(_PERIOD)
            shown = self.run(["sinfo", "--noheader", "--Node", "--format=%T"], capture_output=True, text=True)
            states = shown.stdout.split()

    def start(self, host: str, command: Sequence[str]) -> None:
        """Start a daemon on a host, which runs until the hosts are removed."""
        with (self.folder / f"{command[0]}-{host}.out").open("ab") as out:
            here = self.hosts.command_on(host, command)
            options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            self.daemons.append(subprocess.Popen(here, env=self.environ, **options))  # type: ignore[call-overload]


@contextlib.contextmanager
def slurm(nodes: int = 2, cores: int = 16, *, grace: int = 30, patience: int = 10) -> Iterator[Slurm]:
    """Start a Slurm cluster, and yield it when its nodes are idle; afterwards, end every process on it.

    Args:
        nodes: The number of nodes.
        cores: The cores that each node claims to have.
        grace: The seconds between SIGTERM and SIGKILL at the time limit; Slurm's own default.
        patience: The seconds after which a silent node is regarded as lost.
    """
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="mn-slurm-")))
        daemons: list[subprocess.Popen] = []
        undo.callback(lambda: [each.wait() for each in daemons])
        hosts = undo.enter_context(cluster.cluster(nodes + 1))
        undo.enter_context(hosts.knowing_each_other())
        *names, controller = hosts.names
        values = {"folder": folder, "controller": controller, "nodes": ",".join(names), "cores": cores}
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not looked for: a host's /sys has none
        (folder / "slurm.conf").write_text(_CONF.format(grace=grace, patience=patience, **values))
        found = Slurm(hosts, tuple(names), _environ(folder), folder, daemons)
        _start_munge(found, controller)
        (folder / "state").mkdir()
        found.start(controller, ["slurmctld", "-D"])
        for name in names:
            (folder / f"tmp-{name}").mkdir()
            found.start_node(name)
        found.wait_for_nodes()
        yield found


def _start_munge(found: Slurm, host: str) -> None:
    """Start the one ``munged``, whose socket all hosts see; wait until it answers."""
    folder = found.folder / "munge"
    folder.mkdir(mode=0o755)
    found.folder.chmod(0o755)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    found.start(host, ["munged", "--foreground", "--force", *(f"--{o}={folder / f}" for o, f in files.items())])
    deadline = time.monotonic() + _START_SECONDS
    while found.run(["munge", "--no-input", f"--socket={folder}/socket"], capture_output=True).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError(f"munged does not answer: {(found.folder / f'munged-{host}.out').read_text()}")


def _environ(folder: Path) -> dict[str, str]:
    """Return the environment of the commands: nothing in it says how ``mpiexec`` reaches the nodes, as Slurm does."""
    theirs = ("SLURM_", "PRTE_", "PMIX_", "HYDRA_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    programs = os.path.dirname(sys.executable)
    environ |= {"PATH": f"{programs}{os.pathsep}{_path()}", "SLURM_CONF": str(folder / "slurm.conf")}
    # The machine has fewer cores than the nodes claim.
    return {**environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{_SBIN}"


if __name__ == "__main__":
    sys.exit(main())
