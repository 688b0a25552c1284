"""Names that other libraries have removed and old programs still use; each is restored only on request.

``MN_COMPAT_RESTORE`` in the environment names what to restore, separated by commas; ``all`` restores everything. These
change other libraries for the whole process, so use them only if a program needs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import NamedTuple

from mn_compat.restorations import numpy, pillow, pyyaml

VARIABLE = "MN_COMPAT_RESTORE"


class Restoration(NamedTuple):
    """A name or behaviour that a library no longer has.

    Attributes:
        name: Short and unique; accepted by ``MN_COMPAT_RESTORE`` and :func:`mn_compat.restore`.
        reason: What fails without it, in one sentence.
        module: Full name of the module that is changed.
        apply: Changes the module, which has been imported.
    """

    name: str
    reason: str
    module: str
    apply: Callable[[ModuleType], None]


RESTORATIONS = (
    Restoration(
        "numpy_names",
        "NumPy 1.24 removed np.float, np.int, np.bool, np.object, np.complex and np.str, aliases of Python's types",
        "numpy",
        numpy.restore_names,
    ),
    Restoration(
        "numpy_stack",
        "np.vstack, np.hstack, np.dstack, np.column_stack and np.stack no longer take a generator",
        "numpy",
        numpy.restore_stacking,
    ),
    Restoration(
        "numpy_scalars",
        "int() and float() of an array of one element fail, unless it has no dimensions, since NumPy 2.4",
        "numpy",
        numpy.restore_scalars,
    ),
    Restoration(
        "pil_antialias",
        "Pillow 10 removed PIL.Image.ANTIALIAS, an alias of LANCZOS",
        "PIL.Image",
        pillow.restore_antialias,
    ),
    Restoration(
        "yaml_load",
        "yaml.load needs a Loader since PyYAML 6; without one it reads plain data again, as SafeLoader does",
        "yaml",
        pyyaml.restore_load,
    ),
    Restoration(
        "pkg_resources",
        "setuptools 82 no longer contains pkg_resources; a small stand-in replaces it",
        "pkg_resources",
        lambda _: None,  # the finder provides the stand-in
    ),
)


def chosen(names: Iterable[str]) -> tuple[Restoration, ...]:
    """Return the restorations with these names; ``all`` means all of them.

    Raises:
        ValueError: There is no restoration with this name.
    """
    wanted = set(names)
    known = {restoration.name for restoration in RESTORATIONS}
    unknown = ", ".join(sorted(wanted - known - {"all"}))
    if unknown:
        raise ValueError(f"expecting names among all, {', '.join(sorted(known))}, got {unknown}")
    return tuple(restoration for restoration in RESTORATIONS if {"all", restoration.name} & wanted)


def requested() -> list[str]:
    """Return the names of the restorations that the environment requests.

    Raises:
        ImportError: It names a restoration that does not exist.
    """
    names = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    try:
        return [restoration.name for restoration in chosen(names)]
    except ValueError as error:
        raise ImportError(f"{VARIABLE}: {error}", name="mn_compat") from error
