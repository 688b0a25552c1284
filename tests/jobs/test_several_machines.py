"""The commands of docs/several-machines.md, on two virtual hosts, if they can be created.

The names of the tests have "example" in them, so that the sessions `examples-mpich` and `examples-openmpi` run them
with either library.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/several-machines.md").read_text()
MPIEXEC = os.path.join(os.path.dirname(sys.executable), "mpiexec")
# The launcher is asked, because initialising MPI here would leave variables for the jobs that the tests start.
VERSION = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=True).stdout
LIBRARY = "mpich" if "HYDRA" in VERSION else "openmpi"
HOSTS = ["node1", "node2"]


def blocks(mark, kind):
    return re.findall(rf"^<!-- {mark}, with: {LIBRARY} -->\n```{kind}\n(.*?)^```$", PAGE, re.M | re.S)


def commands():
    """Return the page's commands for this library, each with what it shows."""
    for block in blocks("on two machines", "console"):
        line, _, shown = block.removeprefix("$ ").partition("\n")
        yield line, shown.splitlines()


@pytest.fixture(scope="module")
def run(virtual_cluster, tmp_path_factory):
    """Return a function that runs a command on the first of two hosts, in a folder with the page's files."""
    folder = tmp_path_factory.mktemp("machines")
    (folder / "hosts").write_text(blocks("file: hosts", "text")[0])
    (folder / "hello.py").write_text(re.search(r"```python\n(.*?)^```$", PAGE, re.M | re.S)[1])
    with virtual_cluster.cluster(len(HOSTS)) as hosts, hosts.knowing_each_other():
        path = os.pathsep.join([str(hosts.ssh.parent), os.path.dirname(sys.executable), os.environ["PATH"]])
        # As in the documentation: the launchers find ssh by themselves.
        environ = {name: value for name, value in hosts.environ.items() if value != str(hosts.ssh)} | {"PATH": path}

        def start(command):
            here = hosts.command_on(HOSTS[0], ["sh", "-c", command])
            return subprocess.run(here, cwd=folder, env=environ, capture_output=True, text=True, timeout=220)

        yield start


COMMANDS = list(commands())


@pytest.mark.parametrize(("line", "shown"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_example_on_two_machines(run, line, shown):
    job = run(line)
    assert job.returncode == 0, job.stdout + job.stderr
    hosts = {f"host {n} of {len(HOSTS)}" for n in range(len(HOSTS))}
    assert hosts <= set(re.findall(r"host \d of \d", job.stdout)), job.stdout + job.stderr
    assert set(shown) <= set(job.stdout.splitlines()), job.stdout + job.stderr


def test_example_has_commands_for_both_libraries():
    for library in ("mpich", "openmpi"):
        assert f"<!-- on two machines, with: {library} -->" in PAGE
        assert f"<!-- file: hosts, with: {library} -->" in PAGE
