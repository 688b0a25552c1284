"""``python -m mn_compat script.py args…`` activates mn_compat, and runs a script.

Use it where ``.pth`` files are not run: with ``pip install --target``, ``PYTHONPATH``, ``python -S``.
"""

from __future__ import annotations

import os
import runpy
import sys

USAGE = "usage: python -m mn_compat SCRIPT [ARG]...\n       python -m mn_compat -m MODULE [ARG]...\n"


def main(arguments: list[str]) -> int:
    """Run the script or module that `arguments` name, as ``__main__``; return an exit status."""
    run = run_script
    if arguments[:1] == ["-m"]:
        run, arguments = run_module, arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        sys.stderr.write(USAGE)
        return 2
    return run(arguments)


def run_module(arguments: list[str]) -> int:
    """Run ``arguments[0]`` as ``python -m`` does; the working directory stays first on the path."""
    sys.argv[:] = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    return 0


def run_script(arguments: list[str]) -> int:
    """Run the file ``arguments[0]`` as ``python`` does, with its folder first on the path."""
    script = arguments[0]
    if not os.path.exists(script):
        sys.stderr.write(f"{sys.executable}: can't open file {os.path.abspath(script)!r}: no such file\n")
        return 2
    sys.argv[:] = arguments
    # With python -P and PYTHONSAFEPATH, the path has no such folder to replace. Python 3.10 has neither.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
