"""The tools for the day a GPU is at hand, and for kernels without one."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")

    def load(name):
        spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # a dataclass looks for its module there
        spec.loader.exec_module(module)
        return module

    return load


def test_the_table(tool, tmp_path):
    try_gpu = tool("try_gpu")
    output = tmp_path / "benchmark-2.txt"
    output.write_text("naive 3 ms\n")
    rows = [try_gpu.Row("mn-comm: unit", 117, 0, 2, 12.4), try_gpu.Row("mn-comm: 2 ranks", 3, 1, 0, 7.9)]
    text = try_gpu.report({"GPUs": "1 x H100 (sm_90)"}, rows, [output])
    assert "| GPUs | 1 x H100 (sm_90) |" in text
    assert "| mn-comm: unit | 117 | 0 | 2 | 12 |" in text
    assert "| mn-comm: 2 ranks | 3 | 1 | 0 | 8 |" in text
    assert text.endswith("## benchmark-2\n\n```\nnaive 3 ms\n```\n")


def test_a_program_that_fails(tool, tmp_path):
    try_gpu = tool("try_gpu")
    row = try_gpu.run_program("it", [sys.executable, "-c", "print('no'); raise SystemExit(3)"], tmp_path / "it.txt")
    assert (row.passed, row.failed) == (0, 1)
    assert (tmp_path / "it.txt").read_text() == "no\n"


def test_the_files_with_tests_that_need_a_gpu(tool):
    try_gpu = tool("try_gpu")
    names = {file.name for file in try_gpu.marked(ROOT / "packages" / "mn-compat" / "tests" / "gpu")}
    assert names == {"test_functions.py", "test_links.py", "test_statistics.py", "test_training.py"}
    assert try_gpu.marked(ROOT / "packages" / "mn-comm" / "tests" / "unit", "on_gpu")
    assert try_gpu.marked(ROOT / "packages" / "mn-data" / "tests" / "unit") == []


def test_the_runs_of_these_files(tool, tmp_path):
    try_gpu = tool("try_gpu")
    tests = ROOT / "packages" / "mn-comm" / "tests"
    planned = list(try_gpu.plan(tests, [1, 2], tmp_path, "on_gpu", try_gpu.Record(tmp_path / "record.json")))
    assert [each.task.name for each in planned] == ["mn-comm unit", "mn-comm mpi, 1 rank", "mn-comm mpi, 2 ranks"]
    for each in planned:
        assert " -m gpu" in " ".join(each.task.command)
        assert "/test_on_gpu.py" in " ".join(each.task.command)


def test_the_mistakes_can_still_be_made(monkeypatch):
    """The text that each replaces is there, and the test that finds it."""
    monkeypatch.syspath_prepend(ROOT / "tools" / "gpu_emulator" / "tests" / "jobs")
    from mistakes import MISTAKES

    for name, mistake in MISTAKES.items():
        source = ROOT / "packages" / "mn-comm" / "src" / "mn_comm" / mistake.file
        assert source.read_text().count(mistake.right) == 1, name
        file, _, test = mistake.test.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), name


def test_without_a_gpu_it_says_so(tool):
    pytest.importorskip("numpy")
    if importlib.util.find_spec("cupy"):
        pytest.skip("CuPy is installed")
    done = subprocess.run([sys.executable, ROOT / "tools" / "try_gpu.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("expected a GPU: ")


def test_the_first_error_of_the_compiler(tool):
    kernels = tool("kernels")
    log = "k.cu(3): warning #177-D: unused\n\n  k.cu(9): error: incomplete type\nk.cu(12): error: another\n"
    assert kernels.first_error(log) == "k.cu(9): error: incomplete type"
    assert kernels.first_error("status 5") == "status 5"
    assert kernels.first_error("") == ""


def test_no_kernels_are_a_failure(tmp_path):
    command = [sys.executable, ROOT / "tools" / "kernels.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "got none" in done.stderr


KERNEL = 'extern "C" __global__ void add(float* x) { x[threadIdx.x] += WHAT; }'


def test_kernels_are_compiled(tool, tmp_path):
    kernels = tool("kernels")
    try:
        kernels.Compiler(12)
    except SystemExit as error:
        pytest.skip(str(error))
    for name, what in [("good", "1"), ("bad", "nothing")]:
        kernel = {"source": KERNEL, "options": [f"-DWHAT={what}", "-I/nowhere"], "names": []}
        (tmp_path / f"{name}.json").write_text(json.dumps(kernel))
    command = [sys.executable, ROOT / "tools" / "kernels.py", tmp_path, "--arch=sm_80,sm_90", "--processes=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "sm_80    1 compiled, 1 failed" in done.stdout
    assert 'bad.json: kernel.cu(1): error: identifier "nothing" is undefined' in done.stdout
