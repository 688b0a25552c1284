"""``python -m mn_compat``, for cases in which ``.pth`` files are not run."""

import sys
from pathlib import Path

import pytest

import mn_compat

# The PYTHONPATH after ``pip install --target``: the folders of mn_compat and of its dependencies.
PATH = [Path(mn_compat.__file__).parents[1], *(entry for entry in sys.path if entry.endswith("site-packages"))]

SCRIPT = """
import sys
import neighbour
import chainer
print(__name__, sys.argv[1:], sys.path[0] == neighbour.FOLDER, __file__ == sys.argv[0])
print(sys.modules["__main__"].__dict__ is globals(), chainer.__version__)
if sys.argv[1:] == ["fail"]:
    raise ValueError("the script's own error")
if sys.argv[1:] == ["exit"]:
    sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "neighbour.py").write_text("import os\nFOLDER = os.path.dirname(__file__)\n")
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


def test_python_without_site_needs_it(python, script):
    assert python("-S", script, path=PATH, check=False).returncode == 1


def test_it_runs_a_script_as_python_does(python, script):
    process = python("-S", "-m", "mn_compat", script, "--epoch", "3", path=PATH)
    first, second = process.stdout.splitlines()
    assert first == "__main__ ['--epoch', '3'] True True"
    assert second.startswith("True 7.8.1")


def test_a_link_to_a_script_puts_the_folder_of_the_file_on_the_path(python, script, tmp_path):
    link = tmp_path / "link.py"
    link.symlink_to(script)
    first = python("-S", "-m", "mn_compat", link, path=PATH).stdout.splitlines()[0]
    assert first == "__main__ [] True True"


def test_it_runs_a_module(python, script):
    path = [*PATH, script.parent]
    first = python("-S", "-m", "mn_compat", "-m", "train", "x", path=path).stdout.splitlines()[0]
    assert first.startswith("__main__ ['x']")


def test_the_traceback_names_the_line_of_the_script(python, script):
    process = python("-S", "-m", "mn_compat", script, "fail", path=PATH, check=False)
    assert process.returncode == 1
    *_, frame, line, error = process.stderr.strip().splitlines()
    assert frame.strip() == f'File "{script}", line 8, in <module>'
    assert line.strip() == """raise ValueError("the script's own error")"""
    assert error == "ValueError: the script's own error"


def test_the_exit_status_is_the_scripts(python, script):
    assert python("-S", "-m", "mn_compat", script, "exit", path=PATH, check=False).returncode == 7


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--help"]])
def test_usage(python, arguments):
    process = python("-m", "mn_compat", *arguments, check=False)
    assert process.returncode == 2
    assert process.stderr.startswith("usage: python -m mn_compat SCRIPT")


def test_a_script_that_is_not_there(python, tmp_path):
    process = python("-m", "mn_compat", tmp_path / "none.py", check=False)
    assert process.returncode == 2
    assert "can't open file" in process.stderr


def test_importing_mn_compat_first_is_the_other_way(python):
    process = python("-S", "-c", "import mn_compat, chainer; print(mn_compat.status().active)", path=PATH)
    assert process.stdout.strip() == "True"
