"""What runs at interpreter start: a gate that wakes ``mn_compat`` when Chainer is first asked for.

Where ``MN_COMPAT_RESTORE`` is set, a library in which there may be something to restore wakes it as well.

Every start of the interpreter pays for this module, so it imports nothing but ``sys``, not even
``__future__``.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


LIBRARIES = ("numpy", "PIL", "yaml", "pkg_resources")


class Gate:
    """A finder that hands the first request for ``chainer`` or ``chainermn`` to ``mn_compat``."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Import ``mn_compat``, which puts its own finders first, and let them answer.

        Raises:
            ImportError: ``mn_compat`` itself cannot be imported.
        """
        if fullname != "chainer" and fullname != "chainermn" and not (fullname in LIBRARIES and _restores()):
            return None
        try:
            from mn_compat.activation import activate
        except ImportError as error:
            # Without the patching Chainer would fail with an error that says nothing about the cause.
            raise ImportError(
                f"{fullname} was asked for, and mn_compat, whose start-up file {__file__} is installed, "
                f"cannot be imported: {error}",
                name=fullname,
            ) from error
        activate()
        # The import that is going on has passed the places where they are now.
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path)
        return next((spec for spec in specs if spec is not None), None)


def _restores() -> bool:
    os = sys.modules.get("os")  # site has imported it
    return os is not None and bool(os.environ.get("MN_COMPAT_RESTORE"))


def install() -> None:
    """Put the gate first in ``sys.meta_path``, once: a virtual environment runs ``.pth`` lines twice."""
    if "mn_compat" in sys.modules or any(isinstance(finder, Gate) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Gate())
