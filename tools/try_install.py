"""Run the commands of README.md under "Install it" from a clean clone, as a user who is not root, and check the result.

    python tools/try_install.py --python /usr/bin/python3.12

The commands are those of the page's first block, unchanged; `python3` is the requested Python. Then two processes
create a communicator. When started as root, everything runs as `nobody`. If the Python is in a folder that only root
can read, it is made visible to that user, which needs ``unshare`` and ``setpriv``. The committed state is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "## Install it", "docs/installation.md": "## With an MPI library from PyPI"}
HELLO = "import chainermn; c = chainermn.create_communicator(); print(c); assert c.size == 2"
NOBODY = 65534
FOREIGN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "TMPDIR")
# As the user: the commands of the page, and then a job of two processes.
SCRIPT = """
set -e
cd "$HOME/clone"
{block}
mpiexec -n 2 python -c '{hello}'
python -m pip list 2>/dev/null | grep -iE '^(pip|numpy|mpi4py|chainer|mn|mpich)'
"""
# As root: mount the Python where the user can reach it, in a mount namespace that ends with the command.
AS_NOBODY = 'mount --bind "$1" "$2" && exec setpriv --reuid {0} --regid {0} --clear-groups bash -c "$3"'


def main() -> int:
    """Install, start a job, print how long it took, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="which one; default %(default)s")
    parser.add_argument("--page", choices=PAGES, default="README.md", help="whose commands; default %(default)s")
    options = parser.parse_args()
    python = shutil.which(options.python)
    if python is None:
        sys.exit(f"expected a Python that there is, got {options.python}")
    block = commands((ROOT / options.page).read_text(), PAGES[options.page])
    print(f"+ {options.page} with {described(python)}:\n{block}\n", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="try-install-") as home:
        status = run(Path(home), python, SCRIPT.format(block=block, hello=HELLO))
    print(f"{'works' if not status else f'failed with status {status}'}, {time.monotonic() - began:.0f} s")
    return status


def commands(page: str, heading: str) -> str:
    """Return the commands in the first block of code under a heading, without prompts."""
    section = page.partition(f"\n{heading}\n")[2]
    found = re.search(r"^```\w*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"expected a block of commands under {heading!r}")
    return re.sub(r"^\$ ", "", found[1], flags=re.MULTILINE).strip()


def described(python: str) -> str:
    """Return the version of a Python, and the version of its pip."""
    code = "import sys, ensurepip; print(sys.version.split()[0], 'and pip', ensurepip.version())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def run(home: Path, python: str, script: str) -> int:
    """Run a script in a folder with a clone of this repository, as another user if this process is root."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(home / "clone")], check=True)
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    links, place = home / "bin", home / "python"
    environment |= {"HOME": str(home), "PATH": f"{links}:/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    links.mkdir()
    links.joinpath("python3").symlink_to(python)
    if os.geteuid() != 0:
        return subprocess.run(["bash", "-c", script], env=environment).returncode
    code = "import sys; print(sys.base_prefix)"
    prefix = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    if prefix != Path("/usr"):
        # Not by a link: a virtual environment made through a link would not find its library.
        environment["PATH"] = f"{place / 'bin'}:{environment['PATH']}"
        environment["LD_LIBRARY_PATH"] = str(place / "lib")  # of a Python that is built with a shared library
    place.mkdir()
    for path in [home, *home.rglob("*")]:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    command = ["unshare", "--mount", "bash", "-c", AS_NOBODY.format(NOBODY), "bash", str(prefix), str(place), script]
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
