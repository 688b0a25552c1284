"""The doctor's checks of Chainer, with each part broken in turn."""

import subprocess
import sys
from pathlib import Path

import chainermn
import numpy as np
import pytest

from chainermn_meta import command, doctor
from mn_tools.doctor import Options

IN_PROBE = "chainer_probe"
NUMPY_2 = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 1 promotes as Chainer expects"
)


def look():
    return {check.name: check for check in doctor.check(Options(seconds=60))}


def test_every_problem_has_a_test_that_provokes_it():
    texts = "".join(path.read_text() for path in Path(__file__).parents[1].glob("*/test_doctor*.py"))
    assert {code for code in doctor.problem.codes if f'"{code}"' not in texts} == set()


def test_chainer_as_it_is(machine):
    checks = look()
    assert [check.code for check in checks.values()] == [""] * 6, checks
    assert list(checks) == ["Chainer", "mn-compat", "fixes", "old names", "NumPy scalars", "chainermn"]
    assert checks["Chainer"].found.startswith("7.8.1")
    assert checks["chainermn"].found == f"ours, {Path(chainermn.__file__).parent}"


def test_no_chainer(machine):
    machine.at_start(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *more: None if name == 'chainer' else find(name, *more)",
        IN_PROBE,
    )
    assert look()["Chainer"].code == "chainer-missing"


def test_another_chainer(machine):
    machine.module("chainer/_version", "__version__ = '6.7.0'")
    machine.module("chainer/__init__", "from chainer._version import __version__\nbackends = None")
    check = look()["Chainer"]
    assert check.code == "chainer-unsupported"
    assert check.found.startswith("6.7.0")


def test_a_chainer_that_cannot_be_imported(machine):
    machine.module("chainer/_version", "__version__ = '7.8.1'")
    machine.module("chainer/__init__", "import no_such_module")
    check = look()["Chainer"]
    assert check.code == "chainer-import-fails"
    assert "no_such_module" in check.found


def test_a_chainer_that_kills_the_process(machine):
    machine.module("chainer/_version", "__version__ = '7.8.1'")
    machine.module("chainer/__init__", "import os; os.abort()")
    check = look()["Chainer"]
    assert check.code == "chainer-import-fails"
    assert "SIGABRT" in check.found


def test_no_mn_compat(machine):
    machine.at_start(
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'mn_compat' not in type(finder).__module__]\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'mn_compat' else find(name, *more)",
        IN_PROBE,
    )
    assert look()["mn-compat"].code == "mn-compat-missing"


def test_a_start_up_file_that_was_not_run(machine):
    machine.at_start(
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'mn_compat' not in type(finder).__module__]",
        IN_PROBE,
    )
    checks = look()
    assert checks["mn-compat"].code == "adapter-not-started"
    assert "python -m mn_compat" in checks["mn-compat"].advice
    assert checks["chainermn"].code == "chainermn-not-ours"


def test_all_fixes_left_out(machine):
    machine.setenv("MN_COMPAT_SKIP", "all")
    assert look()["mn-compat"].code == "adapter-skipped"


def test_a_fix_that_does_not_exist(machine):
    machine.setenv("MN_COMPAT_SKIP", "reporter,banana")
    checks = look()
    assert checks["mn-compat"].code == "adapter-setting"
    assert "banana" in checks["mn-compat"].found


def test_what_is_restored_for_old_programs(machine):
    assert look()["old names"].found.startswith("restored: none; MN_COMPAT_RESTORE can restore numpy_names, ")
    machine.setenv("MN_COMPAT_RESTORE", "numpy_names,yaml_load")
    found = look()["old names"].found
    assert found.startswith("restored: numpy_names, yaml_load; MN_COMPAT_RESTORE can restore numpy_stack, ")
    machine.setenv("MN_COMPAT_RESTORE", "all")
    assert "can restore" not in look()["old names"].found


def test_a_restoration_that_does_not_exist(machine):
    machine.setenv("MN_COMPAT_RESTORE", "numpy_names,banana")
    check = look()["old names"]
    assert check.code == "restore-setting"
    assert check.found == "MN_COMPAT_RESTORE contains unknown names: 'banana'"


@NUMPY_2
@pytest.mark.parametrize(
    ("fix", "said"),
    [("reporter", "averages in a LogReport"), ("hyperparameter", "float64"), ("pad_sequence", "OverflowError")],
)
def test_numpy_scalars(machine, fix, said):
    machine.setenv("MN_COMPAT_SKIP", fix)
    checks = look()
    assert checks["fixes"].code == "fixes-left-out"
    assert checks["fixes"].found.endswith(fix)
    assert checks["NumPy scalars"].code == "numpy-scalars"
    assert said in checks["NumPy scalars"].found
    assert checks["NumPy scalars"].found.count(";") == 0


@pytest.mark.parametrize(
    ("value", "code"), [("bundled", "chainermn-bundled"), ("banana", "chainermn-setting"), ("ours", "")]
)
def test_who_owns_the_name_chainermn(machine, value, code):
    machine.setenv("CHAINERMN_IMPL", value)
    check = look()["chainermn"]
    assert check.code == code
    assert not code or value in check.found


def test_a_chainer_that_sees_no_gpu(machine):
    machine.module(
        "cupy/__init__",
        "import types\n"
        "cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=lambda: 2))\n"
        "def __getattr__(name): raise ImportError('libcublas.so.12: cannot open')",
    )
    check = look()["GPU"]
    assert check.code == "chainer-without-gpu"
    assert "CuPy finds 2 GPUs" in check.found


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        (["doctor", "--json"], ["-m", "chainermn"], True),
        (["doctor"], ["-X", "dev", "-Im", "chainermn"], True),
        ([], ["-mchainermn"], True),
        (["chainermn"], ["-m", "package_of_a_user"], False),
        (["-m", "chainermn"], ["-m", "mpi4py"], False),
    ],
)
def test_python_that_looks_for_the_module_to_run(monkeypatch, arguments, options, expected):
    monkeypatch.setattr(sys, "argv", ["-m", *arguments])
    monkeypatch.setattr(sys, "orig_argv", ["python", *options, *arguments])
    assert command.is_command("chainermn") is expected


def test_a_script_is_no_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "chainermn"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "chainermn"])
    assert not command.is_command("chainermn")


@pytest.mark.parametrize("module", ["chainermn", "chainermn_meta"])
@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2), (["nonsense"], 2)])
def test_usage(module, arguments, status):
    process = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    assert (process.returncode, process.stdout + process.stderr) == (status, doctor.USAGE)
