"""The doctor on several virtual hosts, if they can be created: they are reached and compared, with one rank on each."""

import json
import os
import subprocess
import sys
import tempfile

import pytest


@pytest.fixture(scope="module")
def hosts(virtual_cluster):
    """Two hosts."""
    with virtual_cluster.cluster(2) as made:
        yield made


def examine(hosts, names):
    doctor = [sys.executable, "-m", "chainermn", "doctor", "--json", "--timeout=30", f"--ssh={hosts.ssh}"]
    with tempfile.TemporaryDirectory() as empty:  # jobs that were killed may have left session folders in the usual one
        job = subprocess.run(
            hosts.command_on(hosts.names[0], [*doctor, "--hosts", ",".join(names)]),
            env={**hosts.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "TMPDIR": empty},
            capture_output=True,
            text=True,
            timeout=220,
        )
    assert job.stdout.startswith("{"), job.stdout + job.stderr
    checks = json.loads(job.stdout)["checks"]
    return job, {check["code"] for check in checks if check["code"] and not check["code"].startswith("shm-")}, checks


def test_two_hosts(hosts):
    with hosts.knowing_each_other():
        job, codes, checks = examine(hosts, hosts.names)
    assert (job.returncode, codes) == (0, set()), job.stdout
    across = {check["name"]: check["found"] for check in checks if check["group"] == "Ranks across hosts"}
    assert across["start"] == f"2 ranks on {', '.join(hosts.names)}"
    assert list(across) == ["start", "direct copies", "point-to-point", "reduction", "shared memory", "end"]


def test_hosts_that_do_not_know_this_ones_name(hosts):
    job, codes, _ = examine(hosts, hosts.addresses().values())
    assert (job.returncode, codes) == (1, {"host-resolves-not"}), job.stdout
    assert hosts.names[0] in job.stdout
