"""Run the tests of one folder: ``python tools/run_tests.py packages/mn-comm/tests --ranks 1,2,3,4``.

The folder contains any of ``unit`` (one process), ``mpi`` (each test runs on every rank of one job; one job for each
number of ranks), ``jobs`` (one process for each file; the tests start jobs themselves) and ``elastic`` (the same, only
with Open MPI). All other arguments are passed to pytest. One of these folders, or one file in them, may take the place
of the folder.

With ``--share=quick``, files with the mark ``rest`` are left out; two ranks run the other tests of ``mpi``, and other
numbers of ranks run the files whose mark lists them: ``pytestmark = pytest.mark.sizes(1, 4)``. ``--share=rest`` runs
what this leaves out. Files with the mark ``gpu`` are left out of folders: ``tools/try_gpu.py`` runs them.

Tests run beside one another where they mostly wait. Each process writes to a file, which is shown if tests fail in it,
or if there are arguments for pytest. A job that hangs is ended by pytest's time-outs, which are set in the root's
pyproject.toml, after every rank has written its stack; the first failure on any rank ends its job.

``--plan FILE`` runs several suites, each with the interpreter of its environment, and other commands. The file is
JSON: ``{"title": …, "suites": [{"name": …, "tests": …, "python": …, …}], "commands": [{"name": …, "command": […],
"first": …}]}``; the fields are those of the classes Suite and Command.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from outcomes import Display, Outcome, count, read, show_summary
from scheduling import Cost, Ended, IdleCores, Record, Schedule, Task, run_all

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".nox" / "record.json"
# A record of a complete run, so that the first run in a clone knows what takes long; see CONTRIBUTING.md.
FIRST_RECORD = Path(__file__).with_name("test-times.json")
# Other plugins would cost each process and each rank an import: Hypothesis takes as long as pytest itself.
PYTEST = ["-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
PYTEST += ["--disable-plugin-autoload", "-p", "pytest_timeout"]
# The launchers of MPICH and of Open MPI tell a process its rank, in different variables.
ON_A_RANK = """
folder=$1 rank=${PMI_RANK:-$OMPI_COMM_WORLD_RANK}
shift
exec "$@" --basetemp="$folder/tmp-$rank" --junitxml="$folder/rank-$rank.xml" >"$folder/rank-$rank.log" 2>&1
"""
MAIN_SIZE = 2
# Units that need more than this on a core run in one process for each file.
LONG_SECONDS = 20
# On a busy machine, everything seems to wait.
LEAST_LOAD = 0.5
ESTIMATES = {
    "first": Cost(1.0, 0.7),
    "command": Cost(40.0, 1.0),
    "unit": Cost(10.0, 1.0),
    "gpu": Cost(60.0, 1.0),
    "jobs": Cost(15.0, 0.7),
    "elastic": Cost(20.0, 0.7),
}
GPU = re.compile(r"^[^#\n]*\bmark\.gpu\b", re.MULTILINE)
REST = re.compile(r"^[^#\n]*\bmark\.rest\b", re.MULTILINE)
SIZES = re.compile(r"^[^#\n]*\bmark\.sizes\(([\d, ]+)\)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Suite:
    """A folder of tests, and how it is tested.

    Args:
        name: As it is shown.
        tests: The folder, or one file in it.
        python: The interpreter.
        reports: Where logs and JUnit files are kept, relative to the folder of all reports.
        parts: Some of unit, mpi, jobs and elastic.
        ranks: The numbers of ranks of the jobs of mpi.
        share: quick, rest or all, see ``is_in_share``.
        needs: The names of commands that have to succeed before.
        arguments: Those of pytest.
    """

    name: str
    tests: str
    python: str
    reports: str = ""
    parts: Sequence[str] = ("unit", "mpi", "jobs")
    ranks: Sequence[int] = (1, 2, 3, 4)
    share: str = "all"
    needs: Sequence[str] = ()
    arguments: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Command:
    """Another command, whose exit status tells whether it succeeded; the first ones prepare something for others."""

    name: str
    command: Sequence[str]
    first: bool = False


@dataclasses.dataclass(frozen=True)
class Planned:
    """A task, and how its result is read."""

    task: Task
    suite: str
    reports: Sequence[Path] = ()
    chosen: bool = False


def main() -> int:
    """Run the requested tests, show a table, and return the exit status."""
    arguments = parse_arguments()
    if arguments.installed:
        check_installed(arguments.installed)
    with tempfile.TemporaryDirectory(prefix="mn-", ignore_cleanup_errors=True) as scratch:
        reports = (arguments.reports or Path(scratch, "reports")).resolve()
        title, suites, commands = read_plan(arguments)
        record = Record(arguments.record, FIRST_RECORD if arguments.record == RECORD else None)
        planned = [plan_command(command, reports, record) for command in commands]
        planned += [one for suite in suites for one in plan_suite(suite, reports, record)]
        outcomes = run(planned, record, Path(scratch), verbose=bool(arguments.pytest), title=title)
    passed, failed, skipped = count(outcomes)
    if arguments.reports:
        reports.mkdir(parents=True, exist_ok=True)
        reports.joinpath("counts").write_text(f"{passed} {failed} {skipped}\n")
    return int(failed > 0)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("tests", type=Path, nargs="?")
    parser.add_argument("--plan", type=Path, help="a file with several suites")
    parser.add_argument("--parts", default="unit,mpi,jobs", help="which of them; default %(default)s")
    parser.add_argument("--ranks", default="1,2,3,4", help="sizes of the jobs of mpi; default %(default)s")
    parser.add_argument("--share", choices=("all", "quick", "rest"), default="all", help="which files run")
    parser.add_argument("--installed", metavar="NAME", help="refuse to run unless this package is installed")
    parser.add_argument("--reports", type=Path, help="where logs and JUnit files are kept; default nowhere")
    parser.add_argument("--record", type=Path, default=RECORD, help="what each task took; default %(default)s")
    arguments, arguments_of_pytest = parser.parse_known_args()
    if (arguments.tests is None) == (arguments.plan is None):
        parser.error("expected either a folder or --plan")
    return argparse.Namespace(**vars(arguments), pytest=arguments_of_pytest)


def check_installed(name: str) -> None:
    """Refuse to test a working tree instead of installed packages."""
    module = importlib.util.find_spec(name.replace("-", "_"))
    place = sysconfig.get_path("purelib")
    if module is None or not str(module.origin).startswith(place):
        sys.exit(f"expected {name} to be installed in {place}, got {module and module.origin}")


def read_plan(arguments: argparse.Namespace) -> tuple[str, list[Suite], list[Command]]:
    """Return a title, the suites and the commands that the arguments ask for."""
    if arguments.plan:
        plan = json.loads(arguments.plan.read_text())
        suites = [Suite(**suite) for suite in plan["suites"]]
        return plan["title"], suites, [Command(**command) for command in plan["commands"]]
    tests = arguments.tests.resolve()
    title = f"{arguments.tests}, Python {sys.version.split()[0]}"
    suite = Suite(
        name_of(tests),
        str(tests),
        sys.executable,
        parts=[part for part in arguments.parts.split(",") if part],
        ranks=[int(size) for size in arguments.ranks.split(",") if size],
        share=arguments.share,
        arguments=arguments.pytest,
    )
    return title, [suite], []


def name_of(tests: Path) -> str:
    """Return the name of the package, or of all together, to which a folder of tests or a file in it belongs."""
    package = re.search(r"/packages/([^/]+)/", f"{tests}/")
    return package[1] if package else "product"


def plan_command(command: Command, reports: Path, record: Record) -> Planned:
    """Return the task of a command."""
    log = reports / re.sub(r"\W+", "-", command.name) / "log"
    cost = record.estimate(command.name, ESTIMATES["first" if command.first else "command"])
    task = Task(command.name, list(command.command), log, cost=cost, cores=cost.load)
    return Planned(task, "checks")


def plan_suite(suite: Suite, reports: Path, record: Record) -> Iterator[Planned]:
    """Return the tasks of the parts that exist."""
    for part in suite.parts:
        files = find_files(Path(suite.tests), part)
        if part == "mpi":
            for size in suite.ranks:
                chosen = [file for file in files if is_in_share(file, suite.share, size)]
                if chosen:
                    yield plan_job(suite, size, chosen, reports, record)
        else:
            files = [file for file in files if is_in_share(file, suite.share)]
            if part == "unit" and files and not is_long(suite, record):
                yield plan_process(suite, part, files, reports, record)
            else:
                for file in files:
                    yield plan_process(suite, f"{part}/{file.stem}", [file], reports, record)


def find_files(tests: Path, part: str) -> list[Path]:
    """Return the files of a part that need no GPU; the folder may be that part itself, or one file of it."""
    if tests.is_file():
        return [tests] if part in tests.parts else []
    folder = tests if tests.name == part else tests / part
    return sorted(file for file in folder.glob("**/test_*.py") if not needs_gpu(file))


def is_in_share(file: Path, share: str, size: int = MAIN_SIZE) -> bool:
    """Return whether a file is run.

    Args:
        file: The file.
        share: ``quick`` for files without the mark ``rest``, on two ranks and on those numbers of ranks that their mark
            ``sizes`` lists; ``rest`` for everything else; or ``all``.
        size: The number of ranks.
    """
    is_quick = not REST.search(file.read_text()) and (size == MAIN_SIZE or size in marked_sizes(file))
    return share == "all" or is_quick == (share == "quick")


def marked_sizes(file: Path) -> set[int]:
    """Return the numbers of ranks in the mark ``sizes`` of a file."""
    marks = SIZES.findall(file.read_text())
    return {int(number) for mark in marks for number in mark.split(",") if number.strip()}


def needs_gpu(file: Path) -> bool:
    """Return whether a file has the mark ``gpu``."""
    return GPU.search(file.read_text()) is not None


def is_long(suite: Suite, record: Record) -> bool:
    """Return whether unit tests took so long that their files are worth a process each."""
    cost = record.estimate(f"{suite.name} unit", ESTIMATES["unit"])
    return cost.seconds * cost.load > LONG_SECONDS


def plan_process(suite: Suite, what: str, files: Sequence[Path], reports: Path, record: Record) -> Planned:
    """Return the task that runs files in one process."""
    folder = reports / suite.reports / what
    name = f"{suite.name} {what}"
    report = folder / "rank-0.xml"
    options = [f"--junitxml={report}", *map(str, files), *suite.arguments]
    part = what.split("/")[0]
    cost = record.estimate(name, ESTIMATES[part])
    task = Task(
        name,
        [suite.python, *pytest_for(files), *options],
        folder / "log",
        environment_of(suite.python),
        cost,
        1.0 if part == "unit" else max(cost.load, LEAST_LOAD),
        frozenset(suite.needs),
    )
    return Planned(task, suite.name, [report], chosen=bool(suite.arguments))


def plan_job(suite: Suite, size: int, files: Sequence[Path], reports: Path, record: Record) -> Planned:
    """Return the task that runs files on every rank of a job."""
    folder = reports / suite.reports / f"mpi-{size}"
    name = f"{suite.name} mpi, {size} rank{'s' * (size > 1)}"
    if suite.share == "rest" or (suite.share == "quick" and size != MAIN_SIZE):
        name += f", {suite.share}"
    # Without -x, and the abort by mpi4py that follows, the other ranks would wait for the rank that failed.
    on_each = [suite.python, "-m", "mpi4py", *pytest_for(files), "-x", *map(str, files), *suite.arguments]
    environ = environment_of(suite.python)
    # The environment may not be there yet; another one's mpiexec could be of the other MPI library.
    mpiexec = shutil.which("mpiexec", path=environ["PATH"]) if Path(suite.python).exists() else None
    launcher = mpiexec or str(Path(suite.python).with_name("mpiexec"))
    task = Task(
        name,
        [launcher, "-n", str(size), "sh", "-c", ON_A_RANK, "sh", str(folder), *on_each],
        folder / "log",
        # The last output of a rank must not be lost when it is killed.
        {**environ, "PYTHONUNBUFFERED": "1"},
        record.estimate(name, Cost(30.0, float(size))),
        float(size),
        frozenset(suite.needs),
    )
    return Planned(
        task, suite.name, [folder / f"rank-{rank}.xml" for rank in range(size)], chosen=bool(suite.arguments)
    )


def pytest_for(files: Iterable[Path]) -> list[str]:
    """Return the options with which Python runs pytest, with the plugin of Hypothesis if a file uses it."""
    uses_hypothesis = any("hypothesis" in file.read_text() for file in files)
    return [*PYTEST, *(["-p", "_hypothesis_pytestplugin"] if uses_hypothesis else [])]


def environment_of(python: str) -> dict[str, str]:
    """Return the variables with which the programs beside an interpreter are found first."""
    return {"PATH": os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])}


def run(planned: Sequence[Planned], record: Record, scratch: Path, *, verbose: bool, title: str) -> list[Outcome]:
    """Run the tasks, show how they end, and return their outcomes."""
    by_name = {one.task.name: one for one in planned}
    schedule = Schedule([one.task for one in planned], os.cpu_count() or 1, IdleCores())
    display, outcomes = Display(len(planned)), []

    def note(ended: Ended) -> bool:
        one = by_name[ended.task.name]
        outcome = read(one.suite, ended, one.reports, chosen=one.chosen)
        outcomes.append(outcome)
        if ended.status is not None and not one.chosen:
            record.keep(ended.task.name, dataclasses.replace(ended.cost, failed=bool(outcome.failed)))
        if verbose or outcome.failed:
            display.show_text(logs_of(ended.task, one.reports, failed=bool(outcome.failed)))
        display.show_end(outcome, schedule.seconds_left())
        return not outcome.failed

    for one in planned:
        shutil.rmtree(one.task.log.parent, ignore_errors=True)
    run_all(schedule, note, display.show_running, scratch)
    show_summary(outcomes, display, title)
    return outcomes


def logs_of(task: Task, reports: Sequence[Path], *, failed: bool) -> str:
    """Return what a task has printed: of a job, the first rank's output, or all of it if a test failed."""
    parts = [f"\n== {task.name} ==", text_of(task.log)]
    logs = [report.with_suffix(".log") for report in reports] if ON_A_RANK in task.command else []
    for rank, log in enumerate(logs if failed else logs[:1]):
        parts += [f"-- rank {rank} --", text_of(log) or "did not start"]
    return "\n".join(part for part in parts if part)


def text_of(log: Path) -> str:
    """Return the contents of a file, or nothing if it is not there."""
    return log.read_text(errors="replace").rstrip() if log.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
