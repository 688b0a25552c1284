"""Whether ``chainermn`` is being imported only because ``python -m chainermn`` runs it."""

from __future__ import annotations

import sys


def is_command(name: str) -> bool:
    """Return whether Python is still looking for the module that ``-m`` names, and that is this package.

    While it looks, ``sys.argv`` is "-m" and the arguments after the module's name.
    """
    if sys.argv[:1] != ["-m"]:
        return False
    option = sys.orig_argv[-len(sys.argv)]
    return option == name or (option.startswith("-") and option.endswith(f"m{name}"))
