"""Names of other libraries that are restored on request."""

import importlib.util
import re
from pathlib import Path

import numpy
import pytest

import mn_compat
from mn_compat.helpers import pkg_resources
from mn_compat.restorations import RESTORATIONS, chosen

NAMES = [restoration.name for restoration in RESTORATIONS]
STARTUP = Path(__file__).parents[2] / "startup" / "_mn_compat_startup.py"

# In their current form, shortened.
LIBRARIES = {
    "PIL/__init__.py": "",
    "PIL/Image.py": "import enum\nclass Resampling(enum.IntEnum):\n    LANCZOS = 1\n",
    "yaml.py": "class SafeLoader: pass\n"
    "def load(stream, Loader): return stream, Loader\n"
    "def load_all(stream, Loader): return [(stream, Loader)]\n",
}
# A program's lines after the import, and its error without the restoration.
USES = {
    "numpy_names": (
        "import numpy as np",
        "assert np.zeros(2, np.int).astype(np.float).dtype == 'd'",
        "assert np.array([1], np.bool).dtype == bool",
        "assert np.object is object and np.complex is complex and np.str is str",
        "has no attribute 'int'",
    ),
    "numpy_stack": (
        "import numpy as np",
        "assert np.vstack([i, i] for i in range(3)).tolist() == [[0, 0], [1, 1], [2, 2]]",
        "assert np.stack(map(np.ones, (2, 2, 2)), axis=1).shape == (2, 3)",
        "assert np.hstack(([1], [2])).tolist() == [1, 2]",
        "sequence",
    ),
    "numpy_scalars": (
        "import numpy as np",
        "assert float(np.array([1.5])) == 1.5 and int(np.array([[2.5]])) == 2",
        "assert '%d' % np.ones(1) == '1'",
        "only 0-dimensional arrays",
    ),
    "pil_antialias": ("import PIL.Image", "assert PIL.Image.ANTIALIAS is PIL.Image.Resampling.LANCZOS", "ANTIALIAS"),
    "yaml_load": (
        "import yaml",
        "assert yaml.load('x') == ('x', yaml.SafeLoader) and yaml.load_all('x') == [('x', yaml.SafeLoader)]",
        "assert yaml.load('x', int) == yaml.load('x', Loader=int) == ('x', int)",
        "Loader",
    ),
    "pkg_resources": (
        "import pkg_resources",
        "assert pkg_resources.get_distribution('numpy').version",
        "No module named 'pkg_resources'",
    ),
}


@pytest.fixture
def program(python, tmp_path):
    """A function that runs lines of Python in an environment with current libraries, and returns the process."""
    for name, text in LIBRARIES.items():
        path = tmp_path / "libraries" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(*lines, **options):
        return python("-W", "error", "-c", "\n".join(lines), path=[tmp_path / "libraries"], **options)

    return run


@pytest.fixture
def uses(request):
    """The lines of a program, and its error if the names that it uses do not exist."""
    name = request.param
    if name == "numpy_scalars" and numpy.lib.NumpyVersion(numpy.__version__) < "2.4.0":
        pytest.skip("this NumPy converts arrays of one element")
    if name == "pkg_resources" and importlib.util.find_spec("pkg_resources"):
        pytest.skip("pkg_resources is installed")
    *lines, error = USES[name]
    return name, lines, error


@pytest.mark.parametrize("uses", NAMES, indirect=True)
def test_it_fails_without(program, uses):
    _, lines, error = uses
    process = program(*lines, check=False)
    assert process.returncode == 1
    assert re.search(rf"^\w+Error: .*{error}", process.stderr, re.MULTILINE), process.stderr


@pytest.mark.parametrize("uses", NAMES, indirect=True)
def test_the_variable_restores_before_the_first_line(program, uses):
    name, lines, _ = uses
    program(*lines, MN_COMPAT_RESTORE=name)
    program(*lines, MN_COMPAT_RESTORE="all")


@pytest.mark.parametrize("uses", NAMES, indirect=True)
def test_the_function_restores_before_and_after_the_import(program, uses):
    name, (imports, *lines), _ = uses
    restore = f"import mn_compat; mn_compat.restore({name!r}); mn_compat.restore({name!r})"
    program(restore, imports, *lines)
    if name != "pkg_resources":  # there is nothing to import before
        program(imports, restore, *lines)


def test_nothing_else_is_restored(program):
    code = "import mn_compat, numpy, yaml; print(hasattr(numpy, 'float'), mn_compat.status().restored)"
    assert program(code, MN_COMPAT_RESTORE="yaml_load").stdout.strip() == "False ('yaml_load',)"
    assert program(code).stdout.strip() == "False ()"


def test_a_restored_library_keeps_its_own_loader(program):
    code = "import numpy; print(type(numpy.__loader__).__name__, numpy.__spec__.loader is numpy.__loader__)"
    assert program(code, MN_COMPAT_RESTORE="all").stdout.strip() == "SourceFileLoader True"


def test_a_library_that_is_not_there_is_missed_as_ever(program):
    hide = "import sys; sys.path[:] = [p for p in sys.path if 'libraries' not in p and 'packages' not in p]"
    process = program("import mn_compat", hide, "import yaml", MN_COMPAT_RESTORE="yaml_load", check=False)
    assert process.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'yaml'"


def test_an_installed_pkg_resources_goes_before_the_stand_in(program, tmp_path):
    (tmp_path / "libraries" / "pkg_resources.py").write_text("mine = True\n")
    program("import pkg_resources; assert pkg_resources.mine", MN_COMPAT_RESTORE="all")


def test_chainer_is_patched_as_well(program):
    code = "import numpy, chainer, mn_compat; assert numpy.float is float and mn_compat.status().active"
    program(code, MN_COMPAT_RESTORE="numpy_names")
    program("import chainer", code, MN_COMPAT_RESTORE="numpy_names")


@pytest.mark.parametrize("array", ["np.zeros(2)", "np.zeros((1, 0))", "np.array([None])", "np.array(['x'])"])
def test_other_arrays_are_refused_as_before(program, array):
    process = program("import numpy as np", f"float({array})", check=False, MN_COMPAT_RESTORE="numpy_scalars")
    assert process.returncode == 1
    assert re.match("(Type|Value)Error: ", process.stderr.splitlines()[-1]), process.stderr


def test_arrays_without_dimensions_and_subclasses_convert(program):
    program(
        "import gc, numpy as np; Derived = type('Derived', (np.ndarray,), {}); x = np.array([3.5])",
        "assert float(np.array(2.5)) == 2.5 and int(np.array(7)) == 7 and float(np.array(['2'])) == 2",
        "assert float(x.view(Derived)) == 3.5 and float(np.ma.array([1.5])) == 1.5",
        "gc.collect(); assert [float(x) for _ in range(9999)] == [3.5] * 9999",
        MN_COMPAT_RESTORE="numpy_scalars",
    )


def test_an_unknown_name_is_an_error(program):
    process = program("import numpy", check=False, MN_COMPAT_RESTORE="numpy_names,banana")
    assert process.returncode == 1
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "MN_COMPAT_RESTORE: expecting names among all, numpy_names, " in last
    assert last.endswith("got banana")
    with pytest.raises(ValueError, match="got banana, cherry"):
        mn_compat.restore("cherry", "banana")


def test_an_interpreter_with_other_types_is_refused(monkeypatch):
    from mn_compat.restorations import numpy as restoration

    before = dict(vars(numpy.ndarray))
    monkeypatch.setattr(restoration, "_FIELDS_BEFORE_NUMBERS", 8)
    with pytest.raises(RuntimeError, match="numpy_scalars cannot be restored on cpython"):
        restoration.restore_scalars(numpy)
    assert dict(vars(numpy.ndarray)) == before


def test_the_gate_wakes_for_each_library_and_for_no_other(monkeypatch):
    spec = importlib.util.spec_from_file_location("_mn_compat_startup", STARTUP)
    startup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(startup)
    assert {restoration.module.partition(".")[0] for restoration in RESTORATIONS} == set(startup.LIBRARIES)
    monkeypatch.delenv("MN_COMPAT_RESTORE", raising=False)
    assert not startup._restores()
    monkeypatch.setenv("MN_COMPAT_RESTORE", "all")
    assert startup._restores()


def test_the_readme_lists_every_restoration():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## What can be restored")[2]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", section, re.MULTILINE)
    assert rows == [(restoration.name, restoration.reason) for restoration in RESTORATIONS]
    assert chosen(["all"]) == RESTORATIONS


def test_the_stand_in_for_pkg_resources(tmp_path, monkeypatch):
    (tmp_path / "somebodys").mkdir()
    (tmp_path / "somebodys" / "__init__.py").touch()
    (tmp_path / "somebodys" / "data.txt").write_text("here")
    monkeypatch.syspath_prepend(tmp_path)
    assert pkg_resources.resource_filename("somebodys", "data.txt") == str(tmp_path / "somebodys" / "data.txt")
    assert pkg_resources.resource_string("somebodys", "data.txt") == b"here"
    assert pkg_resources.resource_exists("somebodys", "data.txt")
    assert not pkg_resources.resource_exists("somebodys", "a/b")
    assert pkg_resources.parse_version("1.10") > pkg_resources.parse_version("1.9")
    assert [entry.name for entry in pkg_resources.iter_entry_points("pytest11", "timeout")] == ["timeout"]
    (found,) = pkg_resources.require("numpy>=1", "numpy<1; python_version < '3'")
    assert found.version == pkg_resources.get_distribution("numpy").version == numpy.__version__
    with pytest.raises(pkg_resources.VersionConflict, match=r"expecting numpy<1, got \d"):
        pkg_resources.get_distribution("numpy<1")
    with pytest.raises(pkg_resources.DistributionNotFound, match="expecting a-package-nobody-has, got nothing"):
        pkg_resources.working_set.require("a-package-nobody-has")
