"""``python -m mn_comm COMMAND``: the commands that installed packages offer.

Those of mn-tools are doctor, bench and timeline, that of mn-elastic is elastic. Each has a ``--help`` option.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

GROUP = "mn_comm.commands"  # the entry points of commands: functions of the command line that return the exit status


def main(arguments: list[str], program: str = "mn_comm") -> int:
    """Run the command that the first argument names, with the others; return the exit status."""
    commands = {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}
    usage = f"usage: python -m {program} {{{','.join(commands) or 'COMMAND'}}} [OPTIONS]\n"
    if arguments[:1] and arguments[0] in commands:
        status: int = commands[arguments[0]].load()(arguments[1:])
        return status
    if not commands:
        usage += "doctor, bench and timeline are in another package: pip install mn-tools\n"
        usage += "elastic is in another package: pip install mn-elastic\n"
    if arguments[:1] not in (["-h"], ["--help"]):
        sys.stderr.write(usage)
        return 2
    for name, entry in commands.items():
        usage += f"\n{name}\n    {(entry.load().__doc__ or '').splitlines()[0]}\n"
    sys.stdout.write(usage)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
