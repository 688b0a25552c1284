import os
import subprocess
import sys
from pathlib import Path

import pytest

import mn_compat  # noqa: F401 - where no .pth file was run, this activates it for the tests in this process

HERE = Path(__file__).parent
# These variables are for the tests' own process, not for its children.
NOT_PASSED_ON = ("PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS", "MN_COMPAT_SKIP", "MN_COMPAT_RESTORE", "CHAINERMN_IMPL")


def pytest_configure(config):
    config.addinivalue_line("markers", "installs: creates virtual environments; slow")


@pytest.fixture(scope="session")
def python():
    """A function that runs the interpreter of this environment, and returns the completed process."""

    def run(*arguments, path=(), check=True, **variables):
        environment = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        if path:
            environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
        environment.update(variables)
        process = subprocess.run(
            [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=60
        )
        if check:
            assert process.returncode == 0, process.stdout + process.stderr
        return process

    return run
