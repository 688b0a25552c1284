"""Run a command in a Debian sid, which has newer Pythons than this machine.

    python tools/debian_sid.py --pythons 3.14,3.15 -- python3.15 --version

``debootstrap`` creates it once in ``.nox/debian-sid/root``; later runs find it there. This repository has the same path
inside, and is the working directory of the command. All mounts are made in a namespace of the command, and all its
processes run in another namespace: both disappear when it ends, however it ends. So nothing that removes the folder can
reach the repository through it.

Needs root, and the commands ``debootstrap`` and ``unshare``. Ends with status 77 if it cannot create a Debian sid;
``--check`` only prints the reason, or nothing if it can.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".nox" / "debian-sid" / "root"
CANNOT = 77
# In a new mount namespace, all mounts are private: none that is made in it is visible outside.
APART = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
ENTER = """
set -e
root=$1 repository=$2
shift 2
mkdir -p "$root$repository"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
# A separate /dev/shm: in the host's, the tests could not find out whose segments are still in use.
mount -t tmpfs tmpfs "$root/dev/shm"
mount --bind "$repository" "$root$repository"
# The shell stays, as the first process of its namespace: it reaps those whose parents are gone.
exec chroot "$root" sh -c 'cd "$0" && "$@"; exit $?' "$repository" "$@"
"""
# Variables for reaching a package index are passed on; these files are copied to the same path inside.
CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
NETWORK = ("/etc/resolv.conf", "/etc/hosts")


def main() -> int:
    """Create the Debian sid if it does not exist, run the command in it, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default="3.14,3.15", help="what a new place is to have; default %(default)s")
    parser.add_argument("--check", action="store_true", help="only say why there can be none here")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    missing = what_is_missing()
    if missing:
        print(f"no Debian sid here: {missing}")
        return CANNOT
    if args.check:
        return 0
    if not PLACE.exists():
        make(PLACE, args.pythons.split(","))
    return run(PLACE, args.command[1:] if args.command[:1] == ["--"] else args.command)


def what_is_missing() -> str:
    """Return why there can be no Debian sid here, or an empty string."""
    if os.geteuid() != 0:
        return "it needs root"
    for tool in ("unshare", "debootstrap"):
        if shutil.which(tool) is None:
            return f"there is no command {tool}"
    made = subprocess.run([*APART, "true"], capture_output=True, text=True)
    return f"namespaces may not be made: {made.stderr.strip()}" if made.returncode else ""


def make(place: Path, pythons: Sequence[str]) -> None:
    """Install a minimal Debian sid with these versions of Python into a folder.

    Args:
        place: The folder; it exists only after everything has succeeded.
        pythons: Versions such as ``3.15``.
    """
    unfinished = place.with_name(f"{place.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    packages = ",".join(f"python{python},python{python}-venv" for python in pythons)
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", "sid", str(unfinished)]
    done = subprocess.run([*APART, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"debootstrap could not make a Debian sid:\n{done.stdout[-2000:]}")
    unfinished.rename(place)


def run(place: Path, command: Sequence[str]) -> int:
    """Run a command in the Debian sid; return its exit status."""
    certificates = {os.environ[name] for name in CERTIFICATES if os.environ.get(name)}
    for file in filter(os.path.isfile, (*NETWORK, *certificates)):
        copy = Path(f"{place}{os.path.abspath(file)}")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.unlink(missing_ok=True)  # it may be a link
        shutil.copy(file, copy)
    foreign = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "TMPDIR")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    environment |= {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    inside = ["sh", "-c", ENTER, "sh", str(place), str(ROOT), *command]
    return subprocess.run([*APART, *inside], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
