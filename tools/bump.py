"""Change text that occurs in many files and must be the same in all: the version, or the repository's address.

``python tools/bump.py 8.0.0b1`` or ``python tools/bump.py --repository https://github.com/NAME/NAME``; the session
`bump` of nox does so, and updates uv.lock. With the address of a repository on GitHub, the address of its Pages changes
as well. The tool changes files that Git tracks, except those that describe the past.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOLDERS = ("pyproject.toml", "packages/*/pyproject.toml", "packages/*/src/**/__init__.py", "CITATION.cff")
_NUMBER = "(0|[1-9][0-9]*)"
VERSION = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}((a|b|rc){_NUMBER})?")  # in the form that pip writes
ADDRESS = re.compile(r"https://[\w.-]+(/[\w-][\w.-]*)+")
CHANGELOG = "CHANGELOG.md"


def main(arguments: list[str], root: Path = ROOT) -> None:
    """Change the version or the address, and print the changed files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("version", nargs="?", help="the next version, such as 8.0.0, 8.0.0a2, 8.0.0b1 or 8.0.0rc1")
    what.add_argument("--repository", help="the address of the repository")
    options = parser.parse_args(arguments)
    project = (root / "pyproject.toml").read_text()
    if options.repository is not None:
        address = options.repository.rstrip("/")
        if not ADDRESS.fullmatch(address) or address.endswith(".git"):
            sys.exit(f"expected an address such as https://github.com/NAME/NAME, got {options.repository!r}")
        found = {*replace(root, written(project, "Repository"), address, of_git(root))}
        if pages := pages_of(address):
            found |= {*replace(root, written(project, "Documentation").rstrip("/"), pages, of_git(root))}
        changed = sorted(found)
    else:
        if not VERSION.fullmatch(options.version):
            sys.exit(f"expected a version such as 8.0.0, 8.0.0a2, 8.0.0b1 or 8.0.0rc1, got {options.version!r}")
        if options.version == written(project, "version"):
            sys.exit(f"expected another version, got {options.version!r}, which is the present one")
        changelog = dated_changelog(root, options.version)  # first: if it raises, nothing has changed
        holders = [path for pattern in HOLDERS for path in sorted(root.glob(pattern))]
        changed = [
            *replace(root, written(project, "version"), options.version, holders),
            CHANGELOG,
        ]
        (root / CHANGELOG).write_text(changelog)
    print("\n".join(map(str, changed)))


def written(project: str, key: str) -> str:
    """Return the value of a key in the text of pyproject.toml; Python 3.10 has no tomllib."""
    return re.findall(rf'^{key} = "(.+)"$', project, re.MULTILINE)[0]


def pages_of(address: str) -> str | None:
    """Return the address of a repository's GitHub Pages; ``None`` if the repository is not on GitHub."""
    match = re.fullmatch(r"https://github\.com/([^/]+)/([^/]+)", address)
    return f"https://{match[1].lower()}.github.io/{match[2]}" if match else None


def of_git(root: Path) -> list[Path]:
    """Return the files that Git tracks, except uv.lock, which uv writes."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [root / name for name in listed.split("\0") if name and name != "uv.lock"]


def replace(root: Path, old: str, new: str, files: list[Path]) -> Iterator[Path]:
    """Replace a text in some files, and yield the files that contained it."""
    # Not as a part of a longer version or address.
    pattern = re.compile(rf"(?<![\w.]){re.escape(old)}(?![\w.-])")
    for path in files:
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):  # a picture; or deleted and not committed yet
            continue
        changed = pattern.sub(new, text)
        if changed != text:
            path.write_text(changed)
            yield path.relative_to(root)


def dated_changelog(root: Path, version: str) -> str:
    """Return the changelog with the section "Unreleased" renamed to the version and today's date."""
    text = (root / CHANGELOG).read_text()
    if text.count("## Unreleased\n") != 1:
        sys.exit(f'expected one heading "## Unreleased" in {CHANGELOG}')
    return text.replace("## Unreleased\n", f"## Unreleased\n\n## {version} ({date.today().isoformat()})\n")


if __name__ == "__main__":
    main(sys.argv[1:])
