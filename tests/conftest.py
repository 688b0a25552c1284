import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def mpiexec(tmp_path):
    """Run a script on several ranks, in an empty folder; return what it printed."""

    def run(ranks, *command, **environ):
        launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
        job = subprocess.run(
            [launcher, "-n", str(ranks), sys.executable, *map(str, command)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            capture_output=True,
            text=True,
            timeout=70,
        )
        assert job.returncode == 0, job.stdout + job.stderr
        return job.stdout

    return run


@pytest.fixture(scope="session")
def virtual_cluster():
    """Return the module tools/cluster.py; skip the test if it cannot create hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
        import cluster

        missing = cluster.what_is_missing()
        if missing:
            pytest.skip(f"no virtual cluster here: {missing}")
        yield cluster
