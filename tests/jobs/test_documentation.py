"""The code in the documentation, as a reader would run it.

A comment ``<!-- script: NAME.py, ranks: 1 2 -->`` before a block of Python begins a script, which goes on in the blocks
after it; it is run on as many ranks as are named, and with ``fails`` at the end it has to. A block of commands that
starts such a script shows what it prints, with ``…`` for what may differ. Other commands are run if the comment before
them is ``<!-- run -->``. A block of differences is two scripts: one before them, for a single process, and one after.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in ("api", "_build"))
PAGES.append(ROOT / "README.md")
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]+?) -->\n)?^```(?P<kind>python|console|diff)\n(?P<text>.*?)^```$", re.M | re.S)
SCRIPT = re.compile(r"script: (\S+), ranks:((?: \d)+)(, fails)?")


class Script(NamedTuple):
    page: Path
    name: str
    ranks: list[int]
    fails: bool
    code: str


class Command(NamedTuple):
    page: Path
    line: str
    shown: list[str]
    is_marked: bool


def read(page):
    """Return the scripts and the commands of a page."""
    scripts, commands = [], []
    for block in BLOCK.finditer(page.read_text()):
        mark, text = block["mark"] or "", block["text"]
        if block["kind"] == "console":
            commands += [Command(page, *split(part), mark == "run") for part in re.split(r"^\$ ", text, flags=re.M)[1:]]
        elif block["kind"] == "diff":
            name, ranks, _ = SCRIPT.fullmatch(mark).groups()
            scripts.append(Script(page, f"before_{name}", [1], False, side(text, without="+")))
            scripts.append(Script(page, name, [int(n) for n in ranks.split()], False, side(text, without="-")))
        elif mark:
            name, ranks, fails = SCRIPT.fullmatch(mark).groups()
            scripts.append(Script(page, name, [int(n) for n in ranks.split()], bool(fails), text))
        else:
            assert scripts, f"{page.name}: this belongs to no script: {text[:60]}"
            scripts[-1] = scripts[-1]._replace(code=f"{scripts[-1].code}\n{text}")
    return scripts, commands


def side(difference, without):
    """Return one side of a difference: the lines that do not begin with a sign."""
    return "".join(f"{line[1:]}\n" for line in difference.splitlines() if not line.startswith(without))


def split(part):
    line, _, shown = part.partition("\n")
    return line, shown.splitlines()


SCRIPTS = [script for page in PAGES for script in read(page)[0]]
COMMANDS = [command for page in PAGES for command in read(page)[1]]
JOBS = [(script, ranks) for script in SCRIPTS for ranks in script.ranks]
MARKED = [command for command in COMMANDS if command.is_marked]


def started_by(command):
    """Return the number of ranks and the script that a command starts, or None."""
    started = re.search(r"mpiexec -n (\d+) python (\w+\.py)$", command.line)
    return started and (int(started[1]), started[2])


def prints(line, shown):
    """Whether a line that the page shows, or one like it where it has an ellipsis, is what was printed."""
    return re.search(r"[ \t]+".join(".*".join(map(re.escape, w.split("…"))) for w in shown.split()), line)


def check(shown, printed):
    for line in shown:
        if line.strip(" …"):
            assert any(prints(each, line) for each in printed.splitlines()), f"not printed: {line}\n{printed}"


def run(command, folder):
    """Run a command of a reader, whose PATH begins with this environment; return its status and what it printed."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environ,
        text=True,
        timeout=70,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return job.returncode, job.stdout


@pytest.mark.parametrize(("script", "ranks"), JOBS, ids=[f"{s.page.stem}-{s.name}-{n}" for s, n in JOBS])
def test_script(tmp_path, script, ranks):
    (tmp_path / script.name).write_text(script.code)
    status, printed = run(f"mpiexec -n {ranks} python {script.name}", tmp_path)
    assert bool(status) == script.fails, printed
    for command in COMMANDS:
        if command.page == script.page and started_by(command) == (ranks, script.name):
            check(command.shown, printed)


@pytest.mark.parametrize("command", MARKED, ids=[f"{c.page.stem}-{c.line[:40]}" for c in MARKED])
def test_command(tmp_path, command):
    status, printed = run(command.line, tmp_path)
    assert not status, printed
    check(command.shown, printed)


def test_each_command_that_starts_a_script_of_its_page_is_tried():
    tried = {(script.page, ranks, script.name) for script, ranks in JOBS}
    names = {(script.page, script.name) for script in SCRIPTS}
    started = [(c.page, *started_by(c)) for c in COMMANDS if started_by(c) and (c.page, started_by(c)[1]) in names]
    assert started
    assert set(started) <= tried


def test_a_line_of_the_page_stands_for_what_was_printed():
    assert prints("epoch       main/loss", "epoch  main/loss")
    assert prints("rank 0: accuracy 0.93", "rank 0: accuracy 0.9…")
    assert not prints("rank 0: accuracy 0.83", "rank 0: accuracy 0.9…")
