"""The mechanism: a piece of text, which must occur an exact number of times, is replaced by another.

A fix is just a table of substitutions. Nothing is parsed and nothing is guessed: the last release of Chainer will not
change any more, so the fixes can rely on its exact text. If the text differs, there is an error, rather than a fix that
is silently not applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Substitution(NamedTuple):
    """One replacement of text in one module.

    Attributes:
        module: Full name of the module whose source is changed.
        old: The text to look for; the shortest one that is unambiguous.
        new: The new text. It has as many line breaks as `old`, so that line numbers stay right.
        times: How many times `old` must occur.
    """

    module: str
    old: str
    new: str
    times: int = 1


class Fix:
    """The substitutions that fix one bug, with the name by which they can be omitted.

    Args:
        name: Short and unique; accepted by ``MN_COMPAT_SKIP``.
        reason: What goes wrong without it, in one sentence.
        substitutions: The table.
    """

    def __init__(self, name: str, reason: str, *substitutions: Substitution) -> None:
        self.name = name
        self.reason = reason
        self.substitutions = substitutions


class SubstitutionError(ImportError):
    """A Chainer module does not contain the text that a fix replaces."""


def apply(substitutions: Iterable[Substitution], text: str, *, name: str, path: str) -> str:
    """Return `text` with every substitution made.

    Args:
        substitutions: Those for this one module, in the order they are made.
        text: Source of the module.
        name: Full name of the module, for the error.
        path: File the text was read from, for the error.

    Raises:
        SubstitutionError: A text occurs more or fewer times than it must.
    """
    for _, old, new, times in substitutions:
        found = text.count(old)
        if found != times:
            raise SubstitutionError(
                f"expecting {times} of {old!r} in {path}, found {found}: "
                "this is not the file that Chainer 7.8.1 installs, so mn_compat cannot patch it",
                name=name,
                path=path,
            )
        text = text.replace(old, new)
    return text
