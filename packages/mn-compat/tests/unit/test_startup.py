"""The start-up module: its cost at every start of the interpreter."""

import importlib.util
import pkgutil
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "startup"


@pytest.fixture
def startup(monkeypatch):
    """The start-up module as it is in an interpreter that has just started."""
    spec = importlib.util.spec_from_file_location("_mn_compat_startup", FOLDER / "_mn_compat_startup.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "mn_compat" not in repr(finder)])
    monkeypatch.delitem(sys.modules, "mn_compat")
    spec.loader.exec_module(module)
    return module


def gates(module):
    return [finder for finder in sys.meta_path if isinstance(finder, module.Gate)]


def test_installing_twice_puts_one_gate_first(startup):
    startup.install()
    startup.install()
    assert len(gates(startup)) == 1
    assert isinstance(sys.meta_path[0], startup.Gate)


def test_the_gate_lets_everything_else_pass(startup):
    startup.install()
    for name in ("numpy", "chainercv", "chainerx", "chainer_x", "chainermn_meta"):
        assert sys.meta_path[0].find_spec(name) is None
    assert "mn_compat" not in sys.modules


def test_no_gate_is_installed_where_mn_compat_is_imported_already(startup, monkeypatch):
    monkeypatch.setitem(sys.modules, "mn_compat", startup)
    startup.install()
    assert not gates(startup)


def test_the_start_file_names_the_function_that_the_pth_file_calls():
    (line,) = (FOLDER / "mn_compat_startup.pth").read_text().splitlines()
    assert line == "import _mn_compat_startup; _mn_compat_startup.install()"
    (entry,) = (FOLDER / "mn_compat_startup.start").read_text().splitlines()
    module, _, function = entry.partition(":")
    assert f"{module}; {module}.{function}()" in line


def test_the_entry_of_the_start_file_resolves(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    entry = (FOLDER / "mn_compat_startup.start").read_text().strip()
    assert callable(pkgutil.resolve_name(entry))


def test_it_imports_nothing(python):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.modules.pop('_mn_compat_startup', None)\n"
        "before = set(sys.modules); import _mn_compat_startup; _mn_compat_startup.install()\n"
        "print(sorted(set(sys.modules) - before))"
    )
    assert python("-S", "-c", code, FOLDER).stdout.strip() == "['_mn_compat_startup']"


def test_it_takes_less_than_half_a_millisecond(python):
    # The best of many, without the time of other programs: other load on the machine is not the module's cost.
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); best = 1\n"
        "for _ in range(50):\n"
        "    sys.modules.pop('_mn_compat_startup', None); start = time.thread_time()\n"
        "    import _mn_compat_startup; _mn_compat_startup.install()\n"
        "    best = min(best, time.thread_time() - start)\n"
        "print(best)"
    )
    assert float(python("-S", "-c", code, FOLDER).stdout) < 0.5e-3


def test_without_mn_compat_the_gate_says_what_is_wrong(python):
    code = (
        "import sys; sys.path[:] = [*sys.path, sys.argv[1]]; sys.modules['mn_compat'] = None\n"
        "import _mn_compat_startup; sys.meta_path.insert(0, _mn_compat_startup.Gate()); import chainer"
    )
    process = python("-S", "-c", code, FOLDER, check=False)
    assert process.returncode == 1
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: chainer was asked for, and mn_compat, whose start-up file ")
