"""``python -m mn_comm timeline trace.json``: add the parts of ranks that could not reach rank 0 to a trace."""

from __future__ import annotations

import os
import sys

from mn_tools.timeline.trace import add, load, part_files


def main(argv: list[str]) -> int:
    """Add the parts of ranks that could not reach rank 0 to a timeline, and remove them; return the exit status."""
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.stderr.write("usage: python -m mn_comm timeline FILE, where FILE.rank*.part are\n")
        return 2
    files = part_files(argv[0])
    if not files:
        sys.stderr.write(f"timeline: there is no {argv[0]}.rank*.part\n")
        return 1
    try:
        add(argv[0], [load(file) for file in files])
    except (OSError, ValueError) as error:
        sys.stderr.write(f"timeline: {error}\n")
        return 1
    for file in files:
        os.unlink(file)
    sys.stdout.write(f"{argv[0]}: added {len(files)} ranks\n")
    return 0
