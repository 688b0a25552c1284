"""The ChainerMN in Chainer's wheel passes the same tests as these packages do: `tests/mpi/as_before`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
TESTS = sorted((ROOT / "tests/mpi/as_before").glob("test_*.py"))

# It warns that it is experimental, about an extension that is no longer deprecated, and about itself.
IGNORED = ["ignore::FutureWarning", "ignore:Checkpointer is deprecated", "ignore:Link._device_id is left only"]
OPTIONS = [*(f"-W{each}" for each in IGNORED), "-p", "no:cacheprovider"]
# No other plugins, which would take time at each start.
OPTIONS += ["--disable-plugin-autoload", "-p", "pytest_timeout"]

# On each rank; prints the location of the chainermn that was tested.
RANK = """
import sys
import pytest
import chainermn
from mpi4py import MPI

print(chainermn.__file__, flush=True)
sys.exit(pytest.main([f"--junitxml=rank-{MPI.COMM_WORLD.rank}.xml", *sys.argv[1:]]))
"""


def test_there_are_tests():
    assert len(TESTS) == 8


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Run all of them in one job; return it, and the reports of each rank on its tests."""
    folder = tmp_path_factory.mktemp("as_before")
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    script = folder / "rank.py"
    script.write_text(RANK)
    options = ["-c", ROOT / "pyproject.toml", f"--rootdir={ROOT}", "-x", *OPTIONS]
    done = subprocess.run(
        [launcher, "-n", "2", sys.executable, "-m", "mpi4py", script, *options, *TESTS],
        cwd=folder,
        # Its iterators call int() on an array with one element.
        env={**os.environ, "OMP_NUM_THREADS": "1", "CHAINERMN_IMPL": "bundled", "MN_COMPAT_RESTORE": "numpy_scalars"},
        capture_output=True,
        text=True,
        timeout=220,
    )
    reports = [folder / f"rank-{rank}.xml" for rank in range(2)]
    return done, [list(ElementTree.parse(report).iter("testcase")) if report.exists() else [] for report in reports]


@pytest.mark.parametrize("tests", TESTS, ids=lambda path: path.stem)
def test_the_old_software_passes(tests, job):
    done, ranks = job
    assert done.stdout.count("site-packages/chainermn/__init__.py") == 2
    for cases in ranks:
        results = [[child.tag for child in case] for case in cases if case.get("classname").endswith(f".{tests.stem}")]
        assert [] in results, done.stdout + done.stderr
        assert not any({"failure", "error"} & set(tags) for tags in results), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
