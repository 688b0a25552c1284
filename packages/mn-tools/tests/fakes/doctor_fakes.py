"""Broken machines for the doctor: commands and packages that take precedence over the real ones."""

import os
import stat
import sys
import time
from pathlib import Path

VERSIONS = {
    "MPICH": "HYDRA build details:\n    Version:                                 9.8.7",
    "Open MPI": "mpiexec (Open MPI) 9.8.7\n\nReport bugs to nobody",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701",
}

BLOCK = """
import sys

class Block:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {name!r}:
            raise ModuleNotFoundError("No module named {name!r}", name={name!r})

sys.meta_path.insert(0, Block)
"""


TIME_OUT_AT = """
sys.path.append({folder!r})
import doctor_fakes
from mn_tools.doctor import commands
commands._wait = doctor_fakes.time_out_at(commands._wait, {files!r})
"""


def time_out_at(wait, files):
    """Return a replacement of the doctor's waiting, whose time is over once when all of these files exist.

    So a program's time is over because it hangs at a known place, not because the machine is slow.
    """

    def replacement(process, seconds):
        while process.poll() is None:
            if all(map(os.path.exists, files)):
                for file in files:
                    os.unlink(file)
                return wait(process, 0)
            time.sleep(0.01)
        return wait(process, seconds)

    return replacement


class Machine:
    """The replacements: a folder of commands, folders of modules and of temporary files, and environment variables."""

    def __init__(self, folder: Path, monkeypatch):
        self.bin = folder / "bin"
        self.site = folder / "site"
        self.bin.mkdir()
        self.site.mkdir()
        # Jobs that were killed may have left session folders in the one that all share.
        temporary = folder / "tmp"
        temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(temporary))
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}{os.path.dirname(sys.executable)}:/usr/bin:/bin")
        monkeypatch.setenv("PYTHONPATH", str(self.site))
        for name in list(os.environ):
            if name.startswith(("PMI_", "PMIX_", "OMPI_COMM_WORLD_")):
                monkeypatch.delenv(name)

    def command(self, name, script, folder=None):
        """Create a command, a shell script; return its path."""
        path = (folder or self.bin) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def mpiexec(self, script, family="MPICH", folder=None):
        """Create an mpiexec that reports an implementation, and otherwise does what the script says."""
        version = f"if [ \"$1\" = --version ]; then echo '{VERSIONS[family]}'; exit; fi"
        return self.command("mpiexec", f"{version}\n{script}", folder)

    def plain_mpiexec(self, family="MPICH"):
        """Create an mpiexec that starts its command N times as processes that are unaware of each other."""
        return self.mpiexec('n=$2; shift 2\nfor i in $(seq "$n"); do "$@" & done\nwait', family)

    def module(self, name, text):
        """Create a Python module; ``name`` is its path without the ending, such as ``chainer/__init__``."""
        path = self.site / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)

    def distribution(self, name, version, folder=None):
        """Create the metadata of an installed distribution."""
        path = (folder or self.site) / f"{name}-{version}.dist-info" / "METADATA"
        path.parent.mkdir(parents=True)
        path.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def at_start(self, code, only_in=""):
        """Run code at the start of every Python, or of those whose command line names a module."""
        body = "".join(f"    {line}\n" for line in code.strip().splitlines())
        text = f"import sys\nif any({only_in!r} in word for word in sys.orig_argv):\n{body}"
        with open(self.site / "sitecustomize.py", "a") as file:
            file.write(text)

    def time_out_at(self, *files):
        """Let the time of a program that the doctor has started be over once, when all these files exist."""
        from mn_tools.doctor import commands

        files = list(map(str, files))
        self._monkeypatch.setattr(commands, "_wait", time_out_at(commands._wait, files))
        self.at_start(TIME_OUT_AT.format(folder=os.path.dirname(__file__), files=files), "mn_comm")

    def without_module(self, name):
        """Hide an installed module."""
        self.at_start(BLOCK.format(name=name))

    def path_without_commands(self):
        """Let PATH contain only the machine's own commands."""
        self._monkeypatch.setenv("PATH", str(self.bin))

    def setenv(self, name, value):
        """Set an environment variable."""
        self._monkeypatch.setenv(name, value)
