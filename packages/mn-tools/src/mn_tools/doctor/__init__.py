"""``python -m mn_comm doctor``: checks whether jobs can run here, and says what to do if they cannot.

::

    python -m mn_comm doctor
    python -m mn_comm doctor --ranks 4
    python -m mn_comm doctor --hosts node1,node2
    python -m mn_comm doctor --hostfile hosts --json

Run it without ``mpiexec``. It checks Python, the MPI library that mpi4py uses and the first ``mpiexec`` on PATH. It
starts ranks by itself, which exchange arrays, add up arrays and share memory. It also checks ``/dev/shm``, GPUs and
InfiniBand. If hosts are given, it also checks whether each can be found and reached without a password and has the same
Python and packages, and then starts ranks on all of them.

A broken library cannot end the doctor's own process, or make it hang: each step runs in a separate process, with a time
limit (``--timeout``, in seconds). Hosts are reached with ``ssh``, or with the command that ``--ssh`` names; Open MPI
and MPICH are configured to use it as well.

``--fix`` removes files that killed jobs have left behind, and that no process uses: shared memory of MPICH, and session
folders of Open MPI.

Each line is OK, a warning or a failure. Warnings and failures say what to do, and have a code in brackets, which is the
same in all releases. The exit status is 1 if there was a failure, otherwise 0, and 2 if the command itself is wrong.

``--json`` writes one object in place of the lines::

    {"format": 1, "status": "failure", "program": "mn_comm", "ranks": 2, "hosts": [], "checks": [
      {"group": "MPI", "name": "mpiexec", "status": "failure", "found": "there is none on PATH",
       "code": "mpiexec-missing", "advice": "install ..."}]}

``status`` is ``ok``, ``warning`` or ``failure``; the overall status is the worst one of the checks. ``code`` and
``advice`` are null if there is no problem. A later release may add names, groups, codes and keys; ``format`` is
increased if the meaning of one changes.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from mn_tools.doctor import devices, hosts, launch, memory, mpi, network, software
from mn_tools.doctor.commands import emit, errors_as
from mn_tools.doctor.commands import python as run_python
from mn_tools.doctor.options import Options, parse
from mn_tools.doctor.report import Catalogue, Check, Status, as_json, as_text, ok, summary, worst

__all__ = ["Catalogue", "Check", "Options", "Status", "emit", "errors_as", "examine", "main", "ok", "run_python"]

Examination = Callable[[Options], Iterable[Check]]

# Variables that launchers set for their ranks.
_RANK_VARIABLES = "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"


def main(arguments: list[str], program: str = "mn_comm", more: Sequence[Examination] = ()) -> int:
    """Check whether this machine, or a set of hosts, can run jobs, and say what to do if it cannot.

    Args:
        arguments: The command line.
        program: The package whose doctor this is.
        more: Checks of that package, which run after those of this host.

    Returns:
        0, or 1 if there was a failure, or 2 if it was started as a rank.
    """
    about = str(__doc__).replace("::\n", "").replace("``", "").replace("-m mn_comm", f"-m {program}").strip()
    options = parse(arguments, f"python -m {program} doctor", about)
    rank_variable = next((name for name in _RANK_VARIABLES if name in os.environ), None)
    if rank_variable:
        sys.stderr.write(f"the doctor starts ranks by itself: run it without mpiexec ({rank_variable} is set)\n")
        return 2
    found: list[Check] = []
    if not options.json:
        sys.stdout.write(f"{program} doctor on {socket.gethostname()}\n")
    for check in examine(options, more):
        if not options.json:
            heading = "" if found and found[-1].group == check.group else f"\n{check.group}\n"
            sys.stdout.write(heading + as_text(check))
            sys.stdout.flush()
        found.append(check)
    settings = {"program": program, "ranks": options.ranks, "hosts": list(options.hosts)}
    sys.stdout.write(as_json(found, settings) if options.json else f"\n{summary(found)}")
    return int(worst(found) is Status.FAILURE)


def examine(options: Options, more: Sequence[Examination] = ()) -> Iterator[Check]:
    """Do all checks, one after the other.

    Args:
        options: The command line's settings.
        more: Checks in addition to those of this package.
    """
    broken = set()
    for check in software.check(options):
        broken |= {check.name} if check.status is Status.FAILURE else set()
        yield check
    library = None
    if "mpi4py" not in broken:
        library, about_library = mpi.check_library(options)
        yield from about_library
    launcher, about_launcher = mpi.find_launcher(options)
    yield about_launcher
    if launcher and library:
        yield from mpi.check_match(launcher, library)
        yield mpi.check_survival(library)
    yield from memory.check(options)
    yield from memory.check_leftovers(options)
    job = None
    # Ranks that cannot import the packages would only repeat earlier messages.
    if launcher and library and not broken:
        about_job, job = launch.check(launcher, library, options)
        yield from about_job
    yield from devices.check(options)
    if job:
        yield from devices.check_awareness(job)
        yield from devices.check_sharing(job)
    yield from network.check(options)
    for examination in more:
        yield from examination(options)
    if options.hosts:
        yield from _examine_hosts(options, launcher, library)


def _examine_hosts(options: Options, launcher: mpi.Launcher | None, library: mpi.Library | None) -> Iterator[Check]:
    reached = []
    for check in hosts.check(options, launcher):
        reached.append(check)
        yield check
    # If a host cannot be reached, the job would only report this again, after a long wait.
    if launcher and library and worst(reached) is not Status.FAILURE:
        about_job, job = launch.check(launcher, library, options, options.hosts)
        yield from about_job
        yield from devices.check_sharing(job)
