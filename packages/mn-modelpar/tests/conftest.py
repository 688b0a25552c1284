import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# The fixtures of mn-comm.
sys.path.insert(0, str(Path(__file__).parents[2] / "mn-comm" / "tests" / "fakes"))

from on_gpu import devices, make  # noqa: F401
from shared_fixtures import world  # noqa: F401


@pytest.fixture(scope="session")
def comm():
    import mn_modelpar  # noqa: F401 - before Chainer
    from mn_comm import create_communicator

    return create_communicator("naive")


@pytest.fixture
def check_slope(comm):
    """Compare gradients with the slope of the loss along random directions, in which all ranks move together."""

    def check(loss, arrays, gradients, eps=1e-6, rtol=1e-6, atol=1e-7):
        """``loss`` is this rank's share of the loss, of arrays like ``arrays``; ``gradients`` are those of the sum."""
        random = np.random.RandomState(comm.rank)
        directions = [random.randn(*array.shape) for array in arrays]
        ends = [
            comm.allreduce(np.array(float(loss([a + sign * eps * d for a, d in zip(arrays, directions, strict=True)]))))
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * eps)
        expected = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
        np.testing.assert_allclose(slope, comm.allreduce(np.array(float(expected))), rtol=rtol, atol=atol)

    return check


@pytest.fixture
def mpiexec(tmp_path):
    """Run a script on several ranks; return its exit status, what it printed and what it wrote to stderr."""

    def run(ranks, script, *arguments, **environ):
        file = tmp_path / "model.py"
        file.write_text(script)
        launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
        job = subprocess.run(
            [launcher, "-n", str(ranks), sys.executable, str(file), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return job.returncode, job.stdout, job.stderr

    return run
