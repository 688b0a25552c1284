"""The Debian sid for newer Pythons: what is refused, what is mounted, and that nothing of it remains."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "debian_sid.py"
# It creates a folder that contains only a shell.
DEBOOTSTRAP = f"""#!/bin/sh
for place; do :; done
[ "$FAILS" ] && echo E: no mirror && exit 1
echo "$@" >"$ARGUMENTS"
mkdir -p "$place/proc" "$place/sys" "$place/dev" "$place/etc" "$place/bin"
for file in {shutil.which("sh")} $(ldd {shutil.which("sh")} | grep -o '/[^ ]*'); do
    mkdir -p "$place$(dirname "$file")" && cp -L "$file" "$place$file"
done
[ -e "$place/bin/sh" ] || cp -L {shutil.which("sh")} "$place/bin/sh"
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The tool, with a debootstrap that needs no network."""
    command = tmp_path / "commands" / "debootstrap"
    command.parent.mkdir()
    command.write_text(DEBOOTSTRAP)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ARGUMENTS", str(tmp_path / "arguments"))
    spec = importlib.util.spec_from_file_location("debian_sid", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = module.what_is_missing()
    if missing:
        pytest.skip(missing)
    return module


def test_it_says_why_there_can_be_none(tmp_path):
    command = [sys.executable, TOOL, "--check"]
    done = subprocess.run(command, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 77
    assert re.match("no Debian sid here: (it needs root|there is no command unshare)$", done.stdout)


def test_a_command_runs_in_the_repository_and_leaves_nothing_mounted(tool, tmp_path, capfd):
    place = tmp_path / "place"
    tool.make(place, ["3.14", "3.15"])
    options = (tmp_path / "arguments").read_text()
    assert "--include=python3.14,python3.14-venv,python3.15,python3.15-venv sid" in options
    script = 'echo "$PWD"; echo /proc/[0-9]*; echo /dev/nul?; echo noxfil*; exit 7'
    assert tool.run(place, ["sh", "-c", script]) == 7
    folder, processes, device, file = capfd.readouterr().out.split("\n")[:4]
    assert folder == str(ROOT)
    assert "/proc/1 " in f"{processes} " and len(processes.split()) < 4  # its own, not this machine's
    assert (device, file) == ("/dev/null", "noxfile.py")
    assert str(place) not in Path("/proc/mounts").read_text()
    assert not any(Path(f"{place}{ROOT}").iterdir())
    shutil.rmtree(place)
    assert (ROOT / "noxfile.py").is_file()


def test_a_place_that_cannot_be_made_is_not_there(tool, tmp_path, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(SystemExit, match="debootstrap could not make a Debian sid:\nE: no mirror"):
        tool.make(tmp_path / "place", ["3.15"])
    assert not (tmp_path / "place").exists()
