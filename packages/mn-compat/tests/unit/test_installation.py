"""Real installations into new virtual environments, with uv if it is available, and with pip.

Chainer comes from a wheel that is assembled from the files installed here, and its dependencies are linked into a
folder for PYTHONPATH. So only our own package is built, and only its build requirements are downloaded.
"""

import base64
import csv
import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2]
OURS = ("mn_compat", "_mn_compat", "chainer", "onnx_chainer", "__editable__", "_editable_", "__pycache__")

pytestmark = [pytest.mark.installs, pytest.mark.rest, pytest.mark.timeout(300)]

REPORT = """
import sys, chainer, chainermn, mn_compat
print(chainer.__version__, mn_compat.status().active, type(chainer.reporter.__loader__).__name__)
print(chainermn.__file__)
"""


def run(*command, check=True, cwd=None, path=None, **variables):
    settings = ("CHAINERMN_IMPL", "MN_COMPAT_SKIP", "MN_COMPAT_RESTORE")
    foreign = (*settings, "VIRTUAL_ENV", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    environment.update(variables)
    process = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, cwd=cwd, timeout=200
    )
    if check:
        assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    return process


class Uv:
    name = "uv"

    def __init__(self, executable, folder):
        self.executable = executable
        run(executable, "venv", "--quiet", "--python", sys.executable, folder)
        self.python = folder / "bin" / "python"

    def __call__(self, verb, *arguments):
        options = [] if verb == "uninstall" else ["--no-deps"]
        run(self.executable, "pip", verb, "--quiet", "--python", self.python, *options, *arguments)


class Pip:
    name = "pip"

    def __init__(self, executable, folder):
        # Debian's Python has no ensurepip, which venv needs.
        if executable:
            run(executable, "venv", "--quiet", "--seed", "--python", sys.executable, folder)
        else:
            venv.create(folder, with_pip=True)
        self.python = folder / "bin" / "python"

    def __call__(self, verb, *arguments):
        options = ["--yes"] if verb == "uninstall" else ["--no-deps", "--disable-pip-version-check"]
        run(self.python, "-m", "pip", verb, "--quiet", *options, *arguments)


def uv():
    return shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)


@pytest.fixture(scope="module")
def chainer_wheel(tmp_path_factory):
    """Chainer's wheel, assembled again from the files that it installed into this environment."""
    chainer = distribution("chainer")
    wheel = tmp_path_factory.mktemp("wheels") / f"chainer-{chainer.version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for entry in chainer.files:
            top, name = entry.parts[0], entry.name
            if top in ("..", "__pycache__") or name in ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"):
                continue
            if entry.suffix != ".pyc" and name != "RECORD":
                archive.write(entry.locate(), str(entry))
        (record,) = (entry for entry in chainer.files if entry.name == "RECORD")
        archive.writestr(str(record), "".join(f"{name},,\n" for name in archive.namelist()) + f"{record},,\n")
    return wheel


@pytest.fixture(scope="module")
def our_wheel(tmp_path_factory):
    """The wheel of this package."""
    folder = tmp_path_factory.mktemp("wheels")
    if uv():
        run(uv(), "build", "--quiet", "--wheel", "--out-dir", folder, PACKAGE)
    else:
        builder = Pip(None, tmp_path_factory.mktemp("builder"))
        run(builder.python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, PACKAGE)
    (wheel,) = folder.glob("mn_compat-*.whl")
    return wheel


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory):
    """A folder with links to everything installed here except Chainer and our packages."""
    folder = tmp_path_factory.mktemp("dependencies")
    for entry in sys.path:
        if not entry.endswith("site-packages"):
            continue
        for path in Path(entry).iterdir():
            kept = not path.name.startswith((*OURS, "mn_")) and path.suffix != ".pth"
            if kept and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def environment(request, tmp_path):
    """A new virtual environment and the tool that installs into it: uv or else pip, unless the test chooses one."""
    tool = getattr(request, "param", Uv if uv() else Pip)
    if tool is Uv and not uv():
        pytest.skip("uv is not installed")
    return tool(uv(), tmp_path / "environment")


def report(environment, dependencies, **variables):
    first, second = run(environment.python, "-c", REPORT, path=dependencies, **variables).stdout.splitlines()
    return first, Path(second)


def site_packages(environment):
    return Path(run(environment.python, "-c", "import site; print(site.getsitepackages()[0])").stdout.strip())


def intact(folder):
    """Return whether every file of the bundled chainermn is the same as in Chainer's wheel."""
    files = [file for file in distribution("chainer").files if file.parts[0] == "chainermn" and file.hash]
    assert files
    return all(
        base64.urlsafe_b64encode(hashlib.sha256((folder / file).read_bytes()).digest()).rstrip(b"=").decode()
        == file.hash.value
        for file in files
    )


def add_our_chainermn(folder):
    package = folder / "chainermn_meta" / "chainermn"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    return package / "__init__.py"


# pip takes ten times as long as uv; two of the four combinations show that it behaves in the same way.
@pytest.mark.parametrize(
    ("environment", "editable", "first"),
    [
        pytest.param(Uv, False, "chainer", id="uv-plain-after-chainer"),
        pytest.param(Uv, False, "ours", id="uv-plain-before-chainer"),
        pytest.param(Uv, True, "chainer", id="uv-editable-after-chainer"),
        pytest.param(Uv, True, "ours", id="uv-editable-before-chainer"),
        pytest.param(Pip, False, "ours", id="pip-plain-before-chainer"),
        pytest.param(Pip, True, "chainer", id="pip-editable-after-chainer"),
    ],
    indirect=["environment"],
)
def test_an_installation_takes_effect_and_goes_without_a_trace(
    environment, dependencies, chainer_wheel, our_wheel, editable, first
):
    ours = ["--editable", PACKAGE] if editable else [our_wheel]
    for arguments in [[chainer_wheel], ours] if first == "chainer" else [ours, [chainer_wheel]]:
        environment("install", *arguments)

    folder = site_packages(environment)
    our_chainermn = add_our_chainermn(folder)
    bundled_chainermn = folder / "chainermn" / "__init__.py"
    patched = "7.8.1 True SubstitutingLoader"
    assert report(environment, dependencies) == (patched, our_chainermn)
    assert report(environment, dependencies, CHAINERMN_IMPL="bundled") == (patched, bundled_chainermn)

    environment("uninstall", "mn-compat")
    left = [path.name for path in folder.iterdir() if "mn_compat" in path.name]
    assert left == []
    code = "import sys, importlib.util as u; print(u.find_spec('chainermn').origin, u.find_spec('mn_compat'))"
    process = run(environment.python, "-c", code, path=dependencies)
    assert process.stdout.strip() == f"{bundled_chainermn} None"
    assert process.stderr == ""
    assert intact(folder)


def test_the_lines_of_the_pth_file_run_twice_put_one_gate(environment, our_wheel):
    environment("install", our_wheel)
    folder = site_packages(environment)
    # What site does in a virtual environment, once more to be sure.
    code = (
        "import site, sys; site.addsitedir(sys.argv[1])\n"
        "print([type(finder).__name__ for finder in sys.meta_path if 'Gate' in repr(finder)])"
    )
    assert run(environment.python, "-c", code, folder).stdout.strip() == "['Gate']"


def test_a_target_folder_on_pythonpath(environment, dependencies, chainer_wheel, our_wheel, tmp_path):
    environment("install", "--target", tmp_path / "target", chainer_wheel, our_wheel)
    path = f"{tmp_path / 'target'}{os.pathsep}{dependencies}"
    # .pth files are not run there: Chainer is found, and is not patched.
    code = "import sys; print([f for f in sys.meta_path if 'mn_compat' in repr(f)])"
    assert run(environment.python, "-c", code, path=path).stdout.strip() == "[]"
    code = "import mn_compat, chainer; print(mn_compat.status().active)"
    assert run(environment.python, "-c", code, path=path).stdout.strip() == "True"
    script = tmp_path / "script.py"
    script.write_text("import sys, chainer\nprint(sys.argv[1:], type(chainer.reporter.__loader__).__name__)\n")
    process = run(environment.python, "-m", "mn_compat", script, "x", path=path)
    assert process.stdout.strip() == "['x'] SubstitutingLoader"


def test_the_wheel_holds_the_files_at_its_root(our_wheel):
    with zipfile.ZipFile(our_wheel) as archive:
        names = archive.namelist()
        record = archive.read(next(name for name in names if name.endswith("/RECORD"))).decode()
    top = {name for name in names if "/" not in name}
    assert top == {"_mn_compat_startup.py", "mn_compat_startup.pth", "mn_compat_startup.start"}
    assert {row[0] for row in csv.reader(record.splitlines())} == set(names)
    assert "mn_compat/py.typed" in names
    assert not [name for name in names if "test" in name]


def test_the_wheel_built_from_the_source_distribution_is_the_same(our_wheel, tmp_path):
    if not uv():
        pytest.skip("uv is not installed")
    run(uv(), "build", "--quiet", "--out-dir", tmp_path, PACKAGE)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(our_wheel) as other:
        contents = [{name: archive.read(name) for name in archive.namelist()} for archive in (one, other)]
    assert contents[0] == contents[1]
