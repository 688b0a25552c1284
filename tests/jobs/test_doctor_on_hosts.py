"""The doctor on several virtual hosts, if they can be created: they are reached and compared, with one rank on each."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
HOSTS = ["10.213.77.1", "10.213.77.2"]


class Cluster(NamedTuple):
    tool: ModuleType
    prefix: str
    agent: Path
    network: dict


@pytest.fixture(scope="module")
def cluster():
    """Two hosts; tools/cluster.py is not in a package."""
    spec = importlib.util.spec_from_file_location("cluster", ROOT / "tools/cluster.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = module.what_is_missing()
    if missing:
        pytest.skip(f"no virtual cluster here: {missing}")
    with module.cluster(len(HOSTS), "") as (prefix, agent):
        yield Cluster(module, prefix, agent, module._one_network())


def examine(cluster):
    first = f"{cluster.prefix}-{HOSTS[0]}"
    here = ["ip", "netns", "exec", first, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', first]
    doctor = [sys.executable, "-m", "chainermn", "doctor", "--json", "--timeout=30", f"--ssh={cluster.agent}"]
    environ = {
        **os.environ,
        **cluster.network,
        "PREFIX": cluster.prefix,
        "HYDRA_IFACE": "eth0",
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
    }
    job = subprocess.run(
        [*here, *doctor, "--hosts", ",".join(HOSTS)], env=environ, capture_output=True, text=True, timeout=70
    )
    assert job.stdout.startswith("{"), job.stdout + job.stderr
    checks = json.loads(job.stdout)["checks"]
    return job, {check["code"] for check in checks if check["code"] and not check["code"].startswith("shm-")}, checks


def test_two_hosts(cluster):
    names = {f"{cluster.prefix}-{host}": host for host in HOSTS}
    with cluster.tool.known_to_each_other(dict.fromkeys(names, names)):
        job, codes, checks = examine(cluster)
    assert (job.returncode, codes) == (0, set()), job.stdout
    across = {check["name"]: check["found"] for check in checks if check["group"] == "Ranks across hosts"}
    assert across["start"] == f"2 ranks on {', '.join(names)}"
    assert list(across) == ["start", "point-to-point", "reduction", "shared memory", "end"]


def test_hosts_that_do_not_know_this_ones_name(cluster):
    job, codes, _ = examine(cluster)
    assert (job.returncode, codes) == (1, {"host-resolves-not"}), job.stdout
    assert f"{cluster.prefix}-{HOSTS[0]}" in job.stdout
