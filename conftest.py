"""For the tests of all packages: the environment of the jobs that they start, and jobs that lose ranks."""

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Jobs print as they do for most users. With this variable, print() writes each of its arguments separately, and the
# ranks cut each other's lines in two.
os.environ.pop("PYTHONUNBUFFERED", None)

ROOT = Path(__file__).parent


def pytest_collection_finish():
    """Keep what was imported out of the next garbage collections; pytest alone does five of them at the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def launcher():
    found = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    if "Open MPI" not in subprocess.run([found, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("only Open MPI continues after a rank has died")
    return found


@pytest.fixture
def job(launcher, request, tmp_path):
    """Run code on several ranks, some of which die; return the lines of its output, sorted, and the status."""
    # The stand-ins of the package's tests, and those of mn-comm, which others share.
    shared = ROOT / "packages" / "mn-comm" / "tests" / "fakes"
    fakes = os.pathsep.join(map(str, [request.path.parents[1] / "fakes", shared]))

    def run(ranks, code, *args, options=("--with-ft", "ulfm"), status=0):
        command = [launcher, *options, "-n", str(ranks), sys.executable, "-c", code, *args]
        environ = {**os.environ, "PYTHONPATH": fakes, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=70, env=environ, cwd=tmp_path)
        assert (done.returncode == 0) == (status == 0), done.stdout + done.stderr
        run.stderr = done.stderr
        return sorted(done.stdout.splitlines())

    return run


@pytest.fixture
def spare_job(job, monkeypatch):
    """Run code as ``job`` does, with some of the processes as spares; the code and its arguments come last."""

    def run(spares, processes, code, *args, status=0):
        monkeypatch.setenv("CHAINERMN_SPARES", str(spares))
        printed = job(processes, code, *args, status=status)
        run.stderr = job.stderr
        return printed

    return run
