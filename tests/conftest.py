import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# The fixtures of mn-comm, and what jobs of Slurm need.
sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "mn-comm" / "tests" / "fakes"))
sys.path.insert(0, str(Path(__file__).parent / "slurm"))

from on_gpu import devices, make  # noqa: F401
from shared_fixtures import on_nodes, world  # noqa: F401

WITH_JOBS = [Path(__file__).with_name(part) for part in ("jobs", "elastic")]


def pytest_collection_modifyitems(items):
    """Give whole trainings more time than other tests: other processes may use the cores, too."""
    for item in items:
        if item.path.parent in WITH_JOBS and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture
def mpiexec(tmp_path):
    """Run a script on several ranks, in an empty folder; return what it printed."""

    def run(ranks, *command, options=(), **environ):
        launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
        job = subprocess.run(
            [launcher, *options, "-n", str(ranks), sys.executable, *map(str, command)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            capture_output=True,
            text=True,
            timeout=220,
        )
        assert job.returncode == 0, job.stdout + job.stderr
        run.stderr = job.stderr
        return job.stdout

    return run


@pytest.fixture
def survivors(launcher, mpiexec):
    """Run a script on three ranks of Open MPI, some of which die; return what it printed."""

    def run(*command):
        printed = mpiexec(
            3,
            *command,
            options=("--with-ft", "ulfm"),
            PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
        )
        run.stderr = mpiexec.stderr
        return printed

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


@pytest.fixture(scope="session")
def slurm_cluster(virtual_cluster):
    """Return a Slurm cluster of two virtual nodes; skip the test if there can be none."""
    import slurm_cluster  # it is beside tools/cluster.py

    missing = slurm_cluster.what_is_missing()
    if missing:
        pytest.skip(f"no Slurm here: {missing}")
    with slurm_cluster.slurm() as found:
        yield found


@pytest.fixture
def slurm(slurm_cluster, tmp_path):
    """Submit batch jobs to a Slurm cluster, from an empty folder that is also the users' home."""
    from slurm_jobs import Jobs

    return Jobs(slurm_cluster, tmp_path)


@pytest.fixture
def check_lost_host(virtual_cluster):
    """Lose a part of a host of a training; check that the training ends well, with a given number of ranks."""
    import lost_hosts  # it is beside tools/cluster.py

    def check(loss, ranks):
        # It raises if the lost ranks do not end: without the keeper on their host, they would wait forever.
        outcome = lost_hosts.lose(loss, patience=200)
        assert (outcome.status, outcome.ranks) == (0, ranks), outcome.said
        assert outcome.steps_lost <= lost_hosts.PERIOD, outcome.said

    return check
