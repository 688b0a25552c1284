"""Each mistake in a copy of ``mn_comm`` makes a test fail that runs on the emulated GPU."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy")
pytest.importorskip("gpu_emulator.faults", reason="needs an environment changed by build.py")
sys.path.insert(0, str(Path(__file__).parent))

from mistakes import MISTAKES

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_found(tmp_path, name):
    mistake = MISTAKES[name]
    installed = Path(importlib.util.find_spec("mn_comm").origin).parent
    shutil.copytree(installed, tmp_path / "mn_comm", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "mn_comm" / mistake.file
    source = file.read_text()
    assert source.count(mistake.right) == 1
    file.write_text(source.replace(mistake.right, mistake.wrong))
    ranks = ["-m", "mpi4py"] if "/mpi/" in mistake.test else []
    launcher = [Path(sys.executable).with_name("mpiexec"), "-n", "2"] if ranks else []
    options = ["-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider", "-x", "-q"]
    done = subprocess.run(
        [*launcher, sys.executable, *ranks, "-m", "pytest", *options, ROOT / mistake.test],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "GPU_EMULATOR_NCCL_SECONDS": "10", **mistake.settings},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode
    assert "1 failed" in done.stdout, done.stdout + done.stderr
