"""``python -m mn_comm.timeline trace.json``: add the parts of ranks that could not reach rank 0 to a trace."""

from __future__ import annotations

import glob
import os
import sys

from mn_comm.timeline.trace import add, load


def main(argv: list[str]) -> int:
    """Add all parts of a trace to it, and remove them; return the exit status."""
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.stderr.write("usage: python -m mn_comm.timeline FILE, where FILE.rank*.part are\n")
        return 2
    files = sorted(glob.glob(glob.escape(argv[0]) + ".rank*.part"))
    if not files:
        sys.stderr.write(f"mn_comm.timeline: there is no {argv[0]}.rank*.part\n")
        return 1
    add(argv[0], [load(file) for file in files])
    for file in files:
        os.unlink(file)
    sys.stdout.write(f"{argv[0]}: added {len(files)} ranks\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
