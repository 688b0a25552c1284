"""What scripts can import and call, here and in Chainer's wheel: the documentation lists every difference."""

import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "compare_surface.py"


def run(*arguments):
    job = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=220, check=False)
    assert job.returncode == 0, job.stderr
    return job.stdout


@pytest.fixture(scope="module")
def differences():
    return re.findall(r"^(\S.*)\n    old: .*\n    new: .*$", run(), re.M)


@pytest.fixture(scope="module")
def patterns():
    page = (ROOT / "docs" / "migrating.md").read_text()
    section = page.partition("\n## Names and arguments that differ\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| .+ \| .+ \|$", section, re.M)
    return [pattern for row in rows for pattern in re.findall(r"`(.+?)`", row)]


def matches(path, pattern):
    return fnmatchcase(path, pattern.replace("[", "[[]"))


def test_every_difference_is_in_the_table(differences, patterns):
    assert len(differences) > 10
    unexplained = [path for path in differences if not any(matches(path, pattern) for pattern in patterns)]
    assert not unexplained, "\n".join(unexplained)


def test_the_table_has_nothing_else(differences, patterns):
    assert len(patterns) > 10
    gone = [pattern for pattern in patterns if not any(matches(path, pattern) for path in differences)]
    assert not gone, "\n".join(gone)


def test_what_public_programs_import_is_no_difference(differences):
    used = [
        "communicators._communication_utility.init_nccl_comm",
        "communicators._memory_utility.DeviceMemory",
        "extensions._multi_node_snapshot (module)",
        "extensions.checkpoint._MultiNodeCheckpointer",
        "communicators.mpi_communicator_base.MpiCommunicatorBase._multi_node_mean",
        "communicators.mpi_communicator_base.MpiCommunicatorBase.bcast",
        "links.n_step_rnn.chainermn",
        "testing.get_device to be imported",
    ]
    assert not set(used) & set(differences)
    assert not [path for path in differences if path.endswith((" as an attribute", " (module)"))]


def test_what_only_ours_has():
    added = run("--added").split()
    assert "extensions.main_rank_only" in added
    assert "create_communicator" not in added
