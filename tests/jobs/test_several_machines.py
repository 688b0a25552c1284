"""The commands of docs/several-machines.md, on two virtual hosts, if they can be created.

The names of the tests have "example" in them, so that the sessions `examples-mpich` and `examples-openmpi` run them
with either library.
"""

import importlib.util
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
# In place of ssh: options, the host, and the command to run there.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$PREFIX-10.213.77.${host#node}" unshare --uts sh -c 'hostname "$0"; eval "$*"' "$host" "$@"
"""


def blocks(mark, kind):
    return re.findall(rf"^<!-- {mark}, with: {LIBRARY} -->\n```{kind}\n(.*?)^```$", PAGE, re.M | re.S)


def commands():
    """Return the page's commands for this library, each with what it shows."""
    for block in blocks("on two machines", "console"):
        line, _, shown = block.removeprefix("$ ").partition("\n")
        yield line, shown.splitlines()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs a command on the first of two hosts, in a folder with the page's files."""
    spec = importlib.util.spec_from_file_location("cluster", ROOT / "tools/cluster.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    missing = tool.what_is_missing()
    if missing:
        pytest.skip(f"no virtual cluster here: {missing}")
    folder = tmp_path_factory.mktemp("machines")
    (folder / "hosts").write_text(blocks("file: hosts", "text")[0])
    (folder / "hello.py").write_text(re.search(r"```python\n(.*?)^```$", PAGE, re.M | re.S)[1])
    (folder / "bin").mkdir()
    (folder / "bin/ssh").write_text(SSH)
    (folder / "bin/ssh").chmod(0o755)
    addresses = {host: f"{tool.SUBNET}.{i}" for i, host in enumerate(HOSTS, 1)}
    with tool.cluster(len(HOSTS), "") as (prefix, _):
        namespaces = [f"{prefix}-{address}" for address in addresses.values()]
        path = os.pathsep.join([str(folder / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]])
        environ = {**os.environ, **tool._one_network(), "PREFIX": prefix, "PATH": path, "HYDRA_IFACE": "eth0"}
        # As on the page: with it, Open MPI starts all processes on the first host.
        environ.pop("PRTE_MCA_rmaps_default_mapping_policy", None)

        def start(command):
            here = ["ip", "netns", "exec", namespaces[0], "unshare", "--uts", "sh", "-c", f"hostname node1; {command}"]
            return subprocess.run(here, cwd=folder, env=environ, capture_output=True, text=True, timeout=70)

        with tool.known_to_each_other(dict.fromkeys(namespaces, addresses)):
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
