"""The examples of single features, each with few steps: what they print, and their pictures.

Those in which a process is lost need Open MPI: see tests/elastic.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

FEATURES = Path(__file__).parents[2] / "examples/features"
PNG = b"\x89PNG"

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def test_every_script_is_short_and_on_the_page():
    scripts = {path.name for path in FEATURES.glob("*.py")} - {"setting.py"}
    page = (FEATURES / "README.md").read_text()
    assert set(re.findall(r"^\| `(\S+\.py)` \| `.* examples/features/\1` \|", page, re.M)) == scripts
    assert set(re.findall(r"^`(\S+\.py)` ", page, re.M)) <= scripts
    for script in scripts:
        assert len((FEATURES / script).read_text().splitlines()) < 80, script
    pictures = {path.name for path in (FEATURES / "pictures").iterdir()}
    assert set(re.findall(r"\(pictures/(\S+)\)", page)) == pictures


def test_ways_that_send_fewer_bytes(mpiexec, tmp_path):
    printed = mpiexec(2, FEATURES / "fewer_bytes.py", "--steps", 60)
    found = {way: (int(sent), float(accuracy)) for way, sent, accuracy in WAY.findall(printed)}
    assert len(found) == 10
    exact, _ = found.pop("exact")
    assert all(accuracy > 0.7 for _, accuracy in found.values()), found
    asynchronous, _ = found.pop("asynchronous")
    assert asynchronous <= exact  # it meets as often as the machine's speed allows, at most once a step
    assert all(sent < 0.6 * exact for sent, _ in found.values()), found
    check_picture(tmp_path / "fewer_bytes.png")


WAY = re.compile(r"^(\w+) +(\d+) kB sent, accuracy (\S+)$", re.M)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not limit private memory")
def test_a_model_fits_only_with_sharded_state(mpiexec, tmp_path):
    options = "--steps", 2
    sharded = mpiexec(2, FEATURES / "sharded.py", *options)
    assert len(re.findall(r"^rank \d: parameters 60 MB, state 60 MB, loss [\d.]+$", sharded, re.M)) == 2
    whole = mpiexec(2, FEATURES / "sharded.py", *options, "--whole", 1)
    assert len(re.findall(r"^rank \d: .* out of memory$", whole, re.M)) == 2
    check_picture(tmp_path / "sharded.png")
    check_picture(tmp_path / "whole.png")


def test_a_job_that_is_started_again(tmp_path):
    command = Path(sys.executable).with_name("chainermn"), "elastic", "-n", "2", FEATURES / "restart.py"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr
    assert "killed after step 60, continued after step 50: 120 steps, loss" in done.stdout
    check_picture(tmp_path / "restart.png")


def test_every_process_uses_all_of_its_samples(mpiexec, tmp_path):
    printed = mpiexec(2, FEATURES / "uneven.py", "--epochs", 2)
    rows = [list(map(int, row.split())) for row in re.findall(r"^ +\d[\d ]*$", printed, re.M)]
    assert rows == [[0, 500, 25, 1000, 99], [1, 1000, 50, 2000, 99]]
    check_picture(tmp_path / "uneven.png")


def test_large_mini_batches(mpiexec, tmp_path):
    printed = mpiexec(2, FEATURES / "large_batch.py", "--epochs", 5)
    found = {way.strip(): float(value) for way, value in re.findall(r"^(.+) after .*the end (\S+)$", printed, re.M)}
    assert len(found) == 6
    assert found["large, same learning rate"] < min(found["large, scaled"], found["large, LAMB, warm-up"])
    assert found["large, LARS, warm-up"] > 0.8
    check_picture(tmp_path / "large_batch.png")


def test_overlap_and_its_timeline(mpiexec, tmp_path):
    printed = mpiexec(2, FEATURES / "overlap.py", "--steps", 3)
    assert re.findall(r"^(.+?) +\d+ ms a step$", printed, re.M) == ["after", "during", "one step late"]
    mpiexec(1, FEATURES / "overlap.py", "--draw", 1)
    check_picture(tmp_path / "overlap.png")


def test_a_strategy_in_a_package(mpiexec, tmp_path):
    package = tmp_path / "installed"  # as pip would leave it
    project = (FEATURES / "ring/pyproject.toml").read_text()
    information = package / "ring_of_processes-1.0.dist-info"
    information.mkdir(parents=True)
    name, version = re.search(r'^name = "(.*)"\nversion = "(.*)"$', project, re.M).groups()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (group,) = re.findall(r'^\[project.entry-points."(.*)"]$', project, re.M)
    (entry,) = re.findall(r'^ring = "(.*)"$', project, re.M)
    (information / "entry_points.txt").write_text(f"[{group}]\nring = {entry}\n")
    module = "ring_of_processes.py"
    (package / module).write_text((FEATURES / "ring" / module).read_text())
    printed = mpiexec(3, FEATURES / "own_strategy.py", "--steps", 10, PYTHONPATH=str(package))
    check_picture(tmp_path / "own_strategy.png")
    losses = re.findall(r"^\w+ +loss (\S+), sum of the weights (\S+), \S+ ms a step$", printed, re.M)
    assert len(losses) == 3
    for loss, weights in losses[1:]:
        assert float(loss) == pytest.approx(float(losses[0][0]), rel=0.01)
        assert float(weights) == pytest.approx(float(losses[0][1]), rel=1e-4)


def test_a_compression_of_its_own(mpiexec, tmp_path):
    printed = mpiexec(2, FEATURES / "own_compression.py", "--steps", 60)
    found = re.findall(r"^\S+ +(\S+) of the bytes, accuracy (\S+)$", printed, re.M)
    assert [float(ratio) for ratio, _ in found] == pytest.approx([1, 0.254, 0.134], abs=0.002)
    assert min(float(accuracy) for _, accuracy in found) > 0.8
    check_picture(tmp_path / "own_compression.png")


@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_alone(mpiexec, tmp_path, ranks):
    *_, last = mpiexec(ranks, FEATURES / "kmeans.py").split()
    assert float(last) == pytest.approx(1.77, abs=0.01)
    check_picture(tmp_path / "kmeans.png")
    printed = mpiexec(ranks, FEATURES / "power_iteration.py", "--size", 60)
    assert float(printed.split()[-1]) == pytest.approx(1)
    check_picture(tmp_path / "power_iteration.png")


def check_picture(path):
    assert path.read_bytes().startswith(PNG)
