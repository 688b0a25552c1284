"""``python -m mn_comm``: commands, each of which explains itself with ``--help``.

``doctor`` finds out whether this machine, or a set of hosts, can run jobs, and says what to do where it cannot;
``bench`` measures the communicators.
"""

from __future__ import annotations

import sys

USAGE = "usage: python -m mn_comm {doctor,bench} [OPTIONS]\n"


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names, with the others; return the exit status."""
    command, others = arguments[:1], arguments[1:]
    if command == ["doctor"]:
        from mn_comm import doctor

        return doctor.main(others)
    if command == ["bench"]:
        from mn_comm import bench

        return bench.main(others)
    if command in (["-h"], ["--help"]):
        sys.stdout.write(USAGE + "\n" + str(__doc__).replace("``", ""))
        return 0
    sys.stderr.write(USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
