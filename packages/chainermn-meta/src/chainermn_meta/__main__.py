"""The command ``chainermn``, which is also ``python -m chainermn`` and ``python -m chainermn_meta``."""

import sys

from chainermn_meta.doctor import run


def main() -> int:
    """Run the command that the arguments name, and return its exit status."""
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
