"""Which MPI library mpi4py uses, which mpiexec is first on PATH, and whether they belong together."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mn_tools.doctor import commands
from mn_tools.doctor.options import Options
from mn_tools.doctor.problems import problem
from mn_tools.doctor.report import Check, ok

GROUP = "MPI"
_SETTINGS = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")
# The launchers of a family can start ranks that use the family's libraries.
_FAMILIES = {
    "Open MPI": "Open MPI",
    "MPICH": "MPICH",
    "MPICH2": "MPICH",
    "Intel MPI": "MPICH",
    "MVAPICH": "MPICH",
    "MVAPICH2": "MPICH",
    "Cray MPICH": "MPICH",
    "HPE Cray MPI": "MPICH",
}
_LAUNCHERS = (
    (r"Open MPI\)? *v?([\d.]+\w*)|OpenRTE\) *([\d.]+)|PRRTE\)? *v?([\d.]+)", "Open MPI"),
    (r"Intel\(R\) MPI Library.*?Version ([\d.]+)", "Intel MPI"),
    (r"HYDRA build details.*?Version: *(\S+)", "MPICH"),
)


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py uses.

    Attributes:
        vendor: Its implementation, as mpi4py reports it.
        version: Its version.
        file: Its path; empty if unknown.
    """

    vendor: str
    version: str
    file: str

    @property
    def family(self) -> str:
        """The family of launchers that can start it; empty if unknown."""
        return _FAMILIES.get(self.vendor, "")

    def __str__(self) -> str:
        return f"{self.vendor} {self.version}"


@dataclass(frozen=True)
class Launcher:
    """An ``mpiexec``.

    Attributes:
        path: Its path.
        vendor: Its implementation; empty if it does not report one.
        version: Its version; empty if it does not report one.
    """

    path: str
    vendor: str = ""
    version: str = ""

    @property
    def family(self) -> str:
        """The family of libraries whose ranks it can start; empty if unknown."""
        return _FAMILIES.get(self.vendor, "")

    def __str__(self) -> str:
        return f"{self.vendor} {self.version}".strip() or "an unknown launcher"


def check_library(options: Options) -> tuple[Library | None, list[Check]]:
    """Load and start the library in a separate process.

    Returns:
        The library, if it could be loaded, and the checks.
    """
    outcome = commands.python("mn_tools.doctor.trials", options.seconds, "start_library")
    seen = outcome.facts()
    if "vendor" not in seen:
        return None, [_not_loaded(outcome, seen)]
    library = Library(seen["vendor"], seen["version"], ", ".join(seen["files"]))
    found = ok(GROUP, "library", f"{library}, {library.file or 'file unknown'}")
    return library, [found, _start(outcome, seen)]


def _not_loaded(outcome: commands.Outcome, seen: dict[str, Any]) -> Check:
    error = seen.get("error", outcome.described())
    settings = [name for name in _SETTINGS if name in os.environ]
    if settings and "error" in seen:
        values = ", ".join(f"{name}={os.environ[name]}" for name in settings)
        found = f"mpi4py cannot load one, with {values}: {error}"
        library, wanted = os.environ.get("MPI4PY_LIBMPI", ""), re.search(r"(libmpi\.so\S*): cannot open", error)
        if wanted and os.path.exists(library):  # Debian's MPICH is libmpich.so.12
            return problem("mpi-library-name", GROUP, "library", found, library=library, wanted=wanted[1])
        return problem("mpi-library-setting", GROUP, "library", found, names=" and ".join(settings))
    return problem("mpi-library-missing", GROUP, "library", f"mpi4py cannot load one: {error}")


def _start(outcome: commands.Outcome, seen: dict[str, Any]) -> Check:
    if seen.get("started"):
        threads = "threads may communicate" if seen["threads"] else "one thread at a time may communicate"
        return ok(GROUP, "start alone", f"one process starts without mpiexec; {threads}")
    if outcome.timed_out:
        return problem("mpi-init-hangs", GROUP, "start alone", "a single process hangs in MPI_Init")
    error = seen.get("error", outcome.described(5))
    return problem("mpi-init-fails", GROUP, "start alone", f"a single process dies in MPI_Init: {error}")


def find_launcher(options: Options) -> tuple[Launcher | None, Check]:
    """Find the first ``mpiexec`` on PATH, and identify it.

    Returns:
        The launcher, or the one beside Python if PATH has none, or ``None``; and the checks.
    """
    path = shutil.which("mpiexec")
    beside = _beside_python()
    if path is None and beside is None:
        return None, problem("mpiexec-missing", GROUP, "mpiexec", "there is none on PATH")
    launcher = identify(path or str(beside), options.seconds)
    if isinstance(launcher, str):
        return None, problem("mpiexec-fails", GROUP, "mpiexec", f"{path or beside} --version: {launcher}")
    if path is None:
        found = f"there is none on PATH, but one beside Python: {beside}"
        folder = os.path.dirname(launcher.path)
        return launcher, problem("mpiexec-not-on-path", GROUP, "mpiexec", found, folder=folder)
    return launcher, _judge(launcher, beside)


def _judge(launcher: Launcher, beside: str | None) -> Check:
    found = f"{launcher}, {launcher.path}"
    if not launcher.vendor:
        found = f"{launcher.path} does not say which MPI library it belongs to"
        return problem("mpiexec-unknown", GROUP, "mpiexec", found)
    if beside and os.path.realpath(beside) != os.path.realpath(launcher.path):
        found += f"; not the one of this Python's environment, {beside}"
        return problem("mpiexec-elsewhere", GROUP, "mpiexec", found, folder=os.path.dirname(beside))
    return ok(GROUP, "mpiexec", found)


def identify(path: str, seconds: float) -> Launcher | str:
    """Return the implementation of a launcher, or its error message if it cannot report its version."""
    outcome = commands.run([path, "--version"], seconds)
    if outcome.status != 0:
        return outcome.described()
    for pattern, vendor in _LAUNCHERS:
        match = re.search(pattern, outcome.out + outcome.err, re.DOTALL)
        if match:
            return Launcher(path, vendor, next(filter(None, match.groups()), ""))
    return Launcher(path)


def check_match(launcher: Launcher, library: Library) -> Iterator[Check]:
    """Check whether a launcher and a library belong to the same MPI, if this is known."""
    if not launcher.family or not library.family:
        return
    if launcher.family == library.family:
        yield ok(GROUP, "same MPI", f"mpiexec and mpi4py belong to the same MPI library, {library.family}")
        return
    found = f"{launcher.path} is of {launcher}, but mpi4py runs against {library}, {library.file}"
    beside = _beside_python()
    hint = f"put that of {library.vendor} first on PATH"
    if beside and beside != launcher.path:
        hint += f', probably export PATH="{os.path.dirname(beside)}:$PATH"'
    else:
        hint += f", or make mpi4py load {launcher.vendor} (MPI4PY_LIBMPI, or the package of that library)"
    yield problem("mpiexec-other-mpi", GROUP, "same MPI", found, hint=hint)


def check_survival(library: Library) -> Check:
    """Check whether a job can continue after a rank has died."""
    major = re.match(r"\d+", library.version)
    if library.vendor == "Open MPI" and major and int(major[0]) >= 5:
        found = "training can continue without ranks that die: elastic=True, started by mpiexec --with-ft ulfm"
    else:
        found = f"a rank that dies ends the job: only Open MPI 5 can continue without it, not {library}"
    return ok(GROUP, "lost ranks", found)


def _beside_python() -> str | None:
    return shutil.which("mpiexec", path=os.path.dirname(sys.executable))
