"""Python, and the packages that everything needs."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator

from mn_tools.doctor import commands
from mn_tools.doctor.options import Options
from mn_tools.doctor.problems import problem
from mn_tools.doctor.report import Check, ok

GROUP = "Python"
OLDEST_PYTHON = (3, 10)
NEEDED = {"numpy": (1, 26), "mpi4py": (4, 1)}


def check(options: Options) -> Iterator[Check]:
    """Check Python, NumPy and mpi4py; packages are imported in separate processes."""
    yield check_python(sys.version_info[:2])
    for name, oldest in NEEDED.items():
        yield check_package(name, oldest, options.seconds)


def check_python(version: tuple[int, ...]) -> Check:
    """Check the version of Python."""
    found = f"{platform.python_version()}, {sys.executable}"
    if version < OLDEST_PYTHON:
        found = f"{'.'.join(map(str, version))}, {sys.executable}"
        return problem("python-old", GROUP, "Python", found, oldest=".".join(map(str, OLDEST_PYTHON)))
    return ok(GROUP, "Python", found)


def check_package(name: str, oldest: tuple[int, ...], seconds: float) -> Check:
    """Import a package in a separate process, and check its version."""
    outcome = commands.python("mn_tools.doctor.trials", seconds, "import_package", name)
    record = outcome.facts() or {"error": outcome.described()}
    requirement = f"{name}>={'.'.join(map(str, oldest))}"
    if record.get("missing") == name:
        return problem("package-missing", GROUP, name, "not installed", package=requirement)
    if "error" in record:
        return problem("package-broken", GROUP, name, f"it cannot be imported: {record['error']}", package=requirement)
    if tuple(map(int, re.findall(r"\d+", record["version"])[:2])) < oldest:
        return problem(
            "package-old", GROUP, name, f"{record['version']}, older than {requirement}", package=requirement
        )
    return ok(GROUP, name, f"{record['version']}, {os.path.dirname(record['file'])}")
