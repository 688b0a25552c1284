"""Check the prose of the project: ``python tools/prose.py``; the session ``lint`` runs it.

There are two checks. ``tools/prose-words.txt`` lists phrases that this project does not use, and their replacements;
they are searched for in the documentation, and in the docstrings, comments and messages of the code. proselint, if it
is installed, reads the documentation.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORDS = ROOT / "tools" / "prose-words.txt"
TEXTS = ["*.md", "docs/**/*.md", "packages/*/README.md", "examples/*.md", "benchmarks/results/*.md"]
CODE = ["packages/*/src/**/*.py", "examples/**/*.py", "benchmarks/*.py", "tools/*.py", "docs/**/*.py", "*.py"]
# proselint is made for essays, and takes these for mistakes.
NOT_OURS = {
    "typography.symbols.curly_quotes",  # they are code
    "typography.symbols.ellipsis",
    "weasel_words.very",
    "archaism.misc",
    "misc.but",
}


class Line(NamedTuple):
    """A line of prose and its position."""

    file: Path
    number: int
    text: str


def main() -> int:
    """Print the findings; return 1 if there are any."""
    lines = [*documentation(), *code()]
    rules = list(read_rules(WORDS.read_text()))
    found = [f"{place(line)}: {match[0]!r}: {instead}" for line in lines for match, instead in matches(line, rules)]
    found += proselint()
    for each in found:
        print(each)
    print(f"{len(found)} found in {len(lines)} lines of prose", file=sys.stderr)
    return bool(found)


def read_rules(text: str) -> Iterator[tuple[re.Pattern[str], str]]:
    """Return the patterns of a list, each with its replacement."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, _, instead = line.partition(" => ")
            yield re.compile(pattern, re.IGNORECASE), instead


def matches(line: Line, rules: list[tuple[re.Pattern[str], str]]) -> Iterator[tuple[re.Match[str], str]]:
    """Return the parts of a line that match a rule."""
    for pattern, instead in rules:
        yield from ((match, instead) for match in pattern.finditer(line.text))


def place(line: Line) -> str:
    """Return the file and the number of a line."""
    return f"{line.file.relative_to(ROOT)}:{line.number}"


def documentation() -> Iterator[Line]:
    """Return the lines of the documentation, without code."""
    for file in sorted({file for pattern in TEXTS for file in ROOT.glob(pattern)}):
        for number, text in enumerate(without_code(file.read_text()).splitlines(), 1):
            yield Line(file, number, text)


def without_code(text: str) -> str:
    """Replace fenced and inline code by blanks, so that the remaining text keeps its line numbers."""
    text = re.sub(r"^( *)(`{3,}).*?^ *\2`*$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]+`", "code", text)


def code() -> Iterator[Line]:
    """Return the docstrings, comments and texts of the code."""
    this = {Path(__file__).resolve()}
    for file in sorted({file for pattern in CODE for file in ROOT.glob(pattern)} - this):
        source = file.read_text()
        yield from comments(file, source)
        yield from strings(file, source)


def comments(file: Path, source: str) -> Iterator[Line]:
    """Return the comments of a source."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Line(file, token.start[0], token.string)


def strings(file: Path, source: str) -> Iterator[Line]:
    """Return the strings of a source: docstrings, messages, and all others."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, text in enumerate(node.value.splitlines()):
                yield Line(file, node.lineno + offset, text)


def proselint() -> list[str]:
    """Return the findings of proselint in the documentation, except those that do not apply here."""
    try:
        tools, config = importlib.import_module("proselint.tools"), importlib.import_module("proselint.config")
    except ImportError:
        return []
    options = {**config.default, "checks": {**config.default["checks"], **dict.fromkeys(NOT_OURS, False)}}
    # All files at once: most of its time is spent on starting.
    lines = list(documentation())
    errors = tools.lint("\n".join(line.text for line in lines), config=options)
    errors = [(check, message, line) for check, message, line, *_ in errors if check not in NOT_OURS]
    return [f"{place(lines[line])}: {check}: {message}" for check, message, line in errors]


if __name__ == "__main__":
    sys.exit(main())
