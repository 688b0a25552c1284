"""Starts ranks, as a user would, and checks how far they get."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mn_tools.doctor import commands
from mn_tools.doctor.mpi import Launcher, Library
from mn_tools.doctor.options import Options
from mn_tools.doctor.problems import problem
from mn_tools.doctor.report import Check, Status, ok, worst

STEPS = "point-to-point", "reduction", "shared memory", "end"
_DIRECT = "direct copies"
_REFUSED_TO_MPI = "process_vm_readv failed"
_ON_ONE_HOST = (
    "with MPICH try UCX_TLS=tcp,self or UCX_TLS=sysv,self; with Open MPI OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm"
)
_ON_HOSTS = (
    "a firewall between the hosts, or the wrong network: name it by HYDRA_IFACE=eth0 UCX_NET_DEVICES=eth0 with MPICH, "
    "by PRTE_MCA_prte_if_include=eth0 OMPI_MCA_btl_tcp_if_include=eth0 with Open MPI"
)
_REFUSALS = {r"attempt to run as root": "launch-refuses-root", r"not enough slots": "launch-no-slots"}


@dataclass(frozen=True)
class Job:
    """A job that was run.

    Attributes:
        group: The heading under which its checks are printed.
        ranks: How many were requested.
        command: The command that started it.
        outcome: Its outcome.
        hosts: The hosts, if not this host.
    """

    group: str
    ranks: int
    command: tuple[str, ...]
    outcome: commands.Outcome
    hosts: tuple[str, ...] = ()

    def records(self, step: str, state: str) -> list[dict[str, Any]]:
        """Return what the ranks have reported about the beginning, the end or the error of a step, in their order."""
        found = [each for each in self.outcome.records() if (each["step"], each["state"]) == (step, state)]
        return sorted(found, key=lambda record: int(record["rank"]))

    def found(self, step: str) -> Any:
        """Return rank 0's result of a step, or ``None`` if it did not complete the step."""
        return next((record["found"] for record in self.records(step, "end") if record["rank"] == 0), None)

    def error(self, step: str) -> str:
        """Return the error of some rank in a step, or an empty string."""
        return next((str(record["found"]) for record in self.records(step, "error")), "")

    def problem(self, code: str, name: str, found: str, **values: object) -> Check:
        """Return a problem of this job."""
        hint = _ON_HOSTS if self.hosts else _ON_ONE_HOST
        return problem(code, self.group, name, found, command=shlex.join(self.command), hint=hint, **values)


def check(launcher: Launcher, library: Library, options: Options, hosts: Sequence[str] = ()) -> tuple[list[Check], Job]:
    """Run a job, and return its checks.

    Args:
        launcher: The launcher that starts it.
        library: The MPI library that mpi4py uses.
        options: The number of ranks, the time limit, and how to reach hosts.
        hosts: The hosts on which they run, at least one rank on each; if empty, this host.

    Returns:
        The checks, and the job.
    """
    job = start(launcher, options, hosts)
    checks = list(_judge_start(job, launcher, library))
    if worst(checks) is not Status.FAILURE:
        checks += _judge_exercises(job)
    return checks, job


def start(launcher: Launcher, options: Options, hosts: Sequence[str]) -> Job:
    """Run the job until it ends or its time is over."""
    ranks = max(options.ranks, len(hosts))
    where: list[str] = []
    environ: dict[str, str] = {}
    if hosts:
        flag, per_host = ("--host", -(-ranks // len(hosts))) if launcher.family == "Open MPI" else ("-hosts", 0)
        where = [flag, ",".join(f"{host}:{per_host}" if per_host else host for host in hosts)]
        if options.ssh != ("ssh",):  # the same for MPICH's and Open MPI's launchers
            agent = shlex.join(options.ssh)
            environ = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": agent, "PRTE_MCA_plm_ssh_agent": agent}
    command = (launcher.path, "-n", str(ranks), *where, sys.executable, "-m", "mn_tools.doctor.probe")
    if hosts:
        outcome = commands.run(command, options.seconds, environ=environ)
        return Job("Ranks across hosts", ranks, command, outcome, tuple(hosts))
    with tempfile.TemporaryDirectory() as folder:
        outcome = commands.run([*command, folder], options.seconds)
        written = "".join(path.read_text() for path in sorted(Path(folder).iterdir()))
    return Job("Ranks", ranks, command, dataclasses.replace(outcome, out=outcome.out + written))


def _judge_start(job: Job, launcher: Launcher, library: Library) -> Iterator[Check]:
    """Check whether the requested number of ranks started, and whether they know of each other."""
    worlds = job.records("init", "end")
    if not job.outcome.records():
        yield _nothing_started(job)
    elif not worlds:
        yield _no_world(job)
    elif all(record["size"] == 1 for record in worlds) and len(worlds) == job.ranks > 1:
        found = f"{len(worlds)} processes started, and each believes that it is rank 0 of 1"
        yield job.problem("rank-0-of-1", "start", found, mpiexec=launcher.path, library=library)
    elif [(record["rank"], record["size"]) for record in worlds] != [(r, job.ranks) for r in range(job.ranks)]:
        seen = ", ".join(f"rank {record['rank']} of {record['size']}" for record in worlds)
        yield job.problem("ranks-differ", "start", f"expected ranks 0 to {job.ranks - 1} of {job.ranks}, got {seen}")
    else:
        yield _judge_places(job, list(dict.fromkeys(str(record["host"]) for record in worlds)))


def _judge_places(job: Job, names: list[str]) -> Check:
    """Check the host names that ranks see: ranks with equal names try to share memory."""
    found = f"{job.ranks} ranks on {', '.join(names)}"
    if len(names) < len(job.hosts):
        return job.problem("hosts-look-alike", "start", f"{found}, where {', '.join(job.hosts)} were asked for")
    return ok(job.group, "start", found)


def _nothing_started(job: Job) -> Check:
    outcome = job.outcome
    if outcome.timed_out:
        return job.problem("launch-hangs", "start", f"no rank started in time\n{outcome.said()}".strip())
    for pattern, code in _REFUSALS.items():
        match = re.search(pattern, outcome.out + outcome.err)
        if match:
            return job.problem(code, "start", f"mpiexec refuses: {match[0]}")
    return job.problem("launch-fails", "start", f"no rank started; {outcome.described()}")


def _no_world(job: Job) -> Check:
    errors = job.records("import", "error")
    if errors:
        return job.problem("rank-init-fails", "start", f"{len(errors)} ranks cannot load MPI: {errors[0]['found']}")
    count = len(job.records("import", "begin"))
    how = "stay" if job.outcome.timed_out else "end"
    return job.problem("rank-init-fails", "start", f"{count} ranks {how} in MPI_Init; {job.outcome.described(6)}")


def _judge_exercises(job: Job) -> Iterator[Check]:
    direct = _judge_exercise(job, _DIRECT) if job.found(_DIRECT) is None else _judge_direct_copies(job)
    yield direct
    if direct.status is Status.FAILURE:
        return
    for step in STEPS:
        found = _judge_exercise(job, step)
        yield found
        if found.status is Status.FAILURE:
            return  # the ranks did not reach the next step


def _judge_direct_copies(job: Job) -> Check:
    """Check whether the system lets ranks read one another's memory; some MPI libraries do without, others fail."""
    refusal = str(job.found(_DIRECT))
    failed = _REFUSED_TO_MPI in job.error("point-to-point") + job.outcome.err
    if failed:
        return job.problem("direct-copies-forbidden", _DIRECT, f"long messages fail: {refusal or _REFUSED_TO_MPI}")
    allowed = "ranks of a host may read each other's memory"
    return ok(job.group, _DIRECT, f"forbidden, and MPI does without: {refusal}" if refusal else allowed)


def _judge_exercise(job: Job, step: str) -> Check:
    ended, errors = job.records(step, "end"), job.records(step, "error")
    if len(ended) == job.ranks:
        return ok(job.group, step, str(ended[0]["found"]))
    if errors:
        code = "shared-memory-missing" if step == "shared memory" else "exercise-fails"
        return job.problem(code, step, f"rank {errors[0]['rank']}: {errors[0]['found']}")
    missing = sorted(set(range(job.ranks)) - {record["rank"] for record in ended})
    names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    if job.outcome.timed_out:
        return job.problem("exercise-hangs", step, f"{names} did not finish in time")
    return job.problem("rank-dies", step, f"the job ended while {names} had not done it; {job.outcome.described()}")
