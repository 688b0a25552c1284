"""How the finder changes an import, and which imports it changes."""

import inspect
import linecache
import sys
import traceback
from importlib.util import cache_from_source
from pathlib import Path

import pytest

import mn_compat
from mn_compat.activation import activate
from mn_compat.finder import ChainerFinder, load_table
from mn_compat.loader import SubstitutingLoader

FINDER = activate()


def write_chainer(folder, version, **modules):
    package = folder / "chainer"
    package.mkdir()
    (package / "__init__.py").write_text("from chainer import _version\n__version__ = _version.__version__\n")
    (package / "_version.py").write_text(f"__version__ = {version!r}\n\n_optional_dependencies = []\n")
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    return folder


def test_it_is_first_and_only_once():
    assert mn_compat.activate() is FINDER
    assert sys.meta_path.count(FINDER) == 1
    assert mn_compat.is_active()


@pytest.mark.parametrize(
    "name", ["numpy", "chainercv", "chainerx", "chainermn_meta", "chainermn.functions", "chainer.link", "chain"]
)
def test_other_names_are_left_alone(name):
    assert ChainerFinder().find_spec(name, ["/nowhere"]) is None


def test_only_the_modules_of_the_tables_have_our_loader():
    from chainer import testing  # noqa: F401
    from chainer.links import caffe  # noqa: F401

    # By the module's own name: chainer.cuda is another name for chainer.backends.cuda.
    ours = {
        module.__name__
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "chainer" and isinstance(module.__loader__, SubstitutingLoader)
    }
    assert ours
    assert ours <= set(load_table())
    loaded = {name for name in load_table() if name in sys.modules}
    assert ours == loaded


def test_nothing_is_written_into_numpy_or_over_chainers_files():
    import chainer.reporter
    import numpy

    assert not hasattr(numpy, "float")
    assert "widened" not in Path(chainer.reporter.__file__).read_text(encoding="utf-8")


def test_the_bytecode_cache_is_left_to_the_unpatched_file(python):
    python("-c", "import chainer")
    import chainer.reporter

    cache = Path(cache_from_source(chainer.reporter.__file__))
    assert not cache.exists() or b"widened" not in cache.read_bytes()


@pytest.fixture
def compiled(python, tmp_path):
    """A function that imports Chainer, with no bytecode at first; it returns how many modules were compiled."""
    code = (
        "from mn_compat.loader import SubstitutingLoader as Loader\n"
        "compile, compiled = Loader.source_to_code, []\n"
        "Loader.source_to_code = lambda self, data, path: compiled.append(self.name) or compile(self, data, path)\n"
        "import chainer.reporter\n"
        "code = chainer.Summary.add.__code__\n"
        "assert code.co_filename == chainer.reporter.__file__\n"
        "print(len(compiled), 'widened' in code.co_names)"
    )
    prefix = tmp_path / "prefix"
    return lambda **options: python("-c", code, **{"PYTHONPYCACHEPREFIX": str(prefix), **options}).stdout.split()


@pytest.mark.parametrize("damage", [None, b"", b"not ours", slice(-100)])
def test_patched_modules_are_compiled_once_and_again_if_their_bytecode_is_damaged(compiled, tmp_path, damage):
    number, is_patched = compiled()
    assert int(number) > 40
    assert is_patched == "True"
    if damage is not None:
        (file,) = tmp_path.rglob("mn_compat/bytecode.*.pyc")
        file.write_bytes(file.read_bytes()[damage] if isinstance(damage, slice) else damage)
        assert compiled() == [number, "True"]
    assert compiled() == ["0", "True"]


def test_bytecode_of_patched_modules_is_of_one_installation_and_of_these_patches(compiled, tmp_path):
    import chainer

    number, _ = compiled()
    assert compiled(MN_COMPAT_SKIP="reporter") == ["0", "False"]
    (tmp_path / "chainer").symlink_to(Path(chainer.__file__).parent)
    assert compiled(path=[tmp_path]) == [number, "True"]
    assert compiled(path=[tmp_path]) == ["0", "True"]


def test_no_bytecode_of_patched_modules_is_kept_where_python_keeps_none(compiled, tmp_path):
    number, _ = compiled(PYTHONDONTWRITEBYTECODE="1")
    assert compiled(PYTHONDONTWRITEBYTECODE="1") == [number, "True"]
    assert not list(tmp_path.rglob("*.pyc"))


def test_source_is_found_at_the_right_line():
    from chainer.reporter import Summary
    from chainer.testing import helper

    # Both are behind a substitution in their file.
    assert inspect.getsource(Summary.compute_mean).lstrip().startswith("def compute_mean(self):")
    assert inspect.getsource(helper.without_requires).startswith("def without_requires(")


def test_the_loader_hands_out_the_patched_source():
    import chainer.reporter

    source = chainer.reporter.__loader__.get_source("chainer.reporter")
    assert "value, weight = widened(value), widened(weight)" in source


def test_a_traceback_shows_the_line_that_raised():
    import chainer

    with pytest.raises(TypeError) as caught:
        chainer.Summary().add("text", weight=None)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert frame.filename == chainer.reporter.__file__
    assert frame.line == "self._x += weight * value"
    assert linecache.getline(frame.filename, frame.lineno).strip() == frame.line


@pytest.mark.parametrize("version", ["7.8.1", "7.8.1.post1"])
def test_both_supported_releases_are_patched(python, tmp_path, version):
    path = write_chainer(tmp_path, version, reporter="import chainerx\n\nvalue = value.as_grad_stopped()\n")
    process = python("-c", "import chainer.reporter", path=[path], check=False)
    # The file is not Chainer's, but it is treated as such, and read.
    assert "SubstitutionError" in process.stderr


def test_a_text_that_is_not_there_is_an_import_error_that_names_the_file(python, tmp_path):
    path = write_chainer(tmp_path, "7.8.1", reporter="")
    process = python("-c", "import chainer.reporter", path=[path], check=False)
    assert process.returncode == 1
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("mn_compat.substitution.SubstitutionError: expecting 1 of 'import chainerx")
    assert f"in {tmp_path / 'chainer' / 'reporter.py'}, found 0" in last


@pytest.mark.parametrize("version", ["7.8.0", "7.9.0", "8.0.0"])
def test_another_release_is_left_alone_with_one_warning(python, tmp_path, version):
    path = write_chainer(tmp_path, version, reporter="loader = __loader__", optimizer="")
    process = python(
        "-c",
        "import chainer.reporter, chainer.optimizer, mn_compat\n"
        "print(type(chainer.reporter.loader).__name__, mn_compat.status().active, mn_compat.status().reason)",
        path=[path],
    )
    assert (
        process.stdout.strip()
        == f"SourceFileLoader False Chainer {version} is not supported, only 7.8.1 and 7.8.1.post1"
    )
    assert process.stderr.count("RuntimeWarning") == 1
    assert f"does not patch Chainer {version} in {tmp_path / 'chainer'}" in process.stderr


def test_a_release_without_a_readable_version_is_unknown(python, tmp_path):
    write_chainer(tmp_path, "7.8.1", reporter="")
    (tmp_path / "chainer" / "_version.py").write_text("__version__ = '.'.join(['7', '8', '1'])\nx = 1\n")
    process = python("-c", "import mn_compat; print(mn_compat.status().chainer_version)", path=[tmp_path])
    assert process.stdout.strip() != "7.8.1"


def test_a_module_without_source_is_an_import_error(python, tmp_path):
    write_chainer(tmp_path, "7.8.1")
    (tmp_path / "chainer" / "reporter.pyc").write_bytes(b"")
    process = python("-c", "import chainer.reporter", path=[tmp_path], check=False)
    assert "expecting chainer.reporter as a source file" in process.stderr


def test_chainer_loaded_before_activation_is_an_error(python):
    # Without patches, Chainer's import fails halfway; the modules loaded until then stay in sys.modules.
    process = python(
        "-c",
        "import sys\n"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != 'Gate']\n"
        "try:\n"
        "    import chainer\n"
        "except (AttributeError, ImportError):\n"
        "    pass\n"
        "import mn_compat\n",
        check=False,
    )
    assert process.returncode == 1
    assert "chainer was imported before mn_compat" in process.stderr
    assert "import mn_compat or chainermn before chainer" in process.stderr


def test_an_unknown_fix_to_leave_out_is_an_import_error(python):
    process = python("-c", "import chainer", MN_COMPAT_SKIP="reporter,no_such_fix", check=False)
    assert process.returncode == 1
    assert "expecting MN_COMPAT_SKIP to name fixes among" in process.stderr
    assert process.stderr.strip().endswith("got no_such_fix")


def test_every_fix_can_be_left_out(python):
    code = "import mn_compat; s = mn_compat.status(); print(s.active, s.reason, len(s.left_out))"
    process = python("-c", code, MN_COMPAT_SKIP="all")
    from mn_compat.fixes import FIXES

    assert process.stdout.strip() == f"False MN_COMPAT_SKIP omits every fix {len(FIXES)}"


def test_status_describes_this_environment():
    import chainer

    status = mn_compat.status()
    assert status.active
    assert status.chainer_version == chainer.__version__
    assert status.chainer_path == str(Path(chainer.__file__).parent)
    assert status.left_out == ()
    with pytest.raises(AttributeError):
        status.active = False
