"""The ChainerMN in Chainer's wheel passes the same tests as these packages do: `tests/mpi/as_before`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = sorted((ROOT / "tests/mpi/as_before").glob("test_*.py"))

# It warns that it is experimental, about an extension that is no longer deprecated, and about itself.
IGNORED = ["ignore::FutureWarning", "ignore:Checkpointer is deprecated", "ignore:Link._device_id is left only"]
OPTIONS = [*(f"-W{each}" for each in IGNORED), "-p", "no:cacheprovider"]

# On each rank; prints the location of the chainermn that was tested.
RANK = """
import sys
import pytest
import chainermn

print(chainermn.__file__, flush=True)
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_there_are_tests():
    assert len(TESTS) == 8


@pytest.mark.parametrize("tests", TESTS, ids=lambda path: path.stem)
def test_the_old_software_passes(tests, tmp_path):
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    options = ["-c", ROOT / "pyproject.toml", f"--rootdir={ROOT}", "-x", *OPTIONS]
    job = subprocess.run(
        [launcher, "-n", "2", sys.executable, "-m", "mpi4py", script, *options, tests],
        cwd=tmp_path,
        # Its iterators call int() on an array with one element.
        env={**os.environ, "OMP_NUM_THREADS": "1", "CHAINERMN_IMPL": "bundled", "MN_COMPAT_RESTORE": "numpy_scalars"},
        capture_output=True,
        text=True,
        timeout=70,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("site-packages/chainermn/__init__.py") == 2
    assert job.stdout.count(" passed") == 2
