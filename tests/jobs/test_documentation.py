"""The code in the documentation, as a reader would run it.

A comment before a block says how it is tested:

``<!-- script: NAME.py, ranks: 1 2 -->``
    A block of Python begins a script, which continues in the following blocks. It is run on each number of ranks; with
    ``, fails`` at the end, it has to fail. ``, alone`` in place of the ranks runs it without ``mpiexec``; ``, needs:
    MODULE`` skips it if that module is not installed. A block of differences consists of two scripts: one before the
    change, for a single process, and one after it.
``<!-- run -->``
    The commands of a block are run, and have to succeed.
``<!-- on two machines, with: mpich -->``
    The commands are run by ``test_several_machines.py``.
``<!-- not run: WHY -->``
    Nothing is run, for the reason given.

A block of commands that starts a script of its page needs no comment. It shows the output of the script, with ``…`` for
parts that may differ.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.rest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
PAGES.append(ROOT / "README.md")
BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]+?) -->\n)?^(?P<indent> *)```(?P<kind>python|console|bash|diff)\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
SCRIPT = re.compile(r"script: (?P<name>\S+), (?:ranks:(?P<ranks>(?: \d)+)|alone)(?:, needs: (?P<needs>\w+))?(, fails)?")
OTHER = re.compile(r"run|not run: .+|on two machines, with: (mpich|openmpi)")
ALONE = 0  # in place of a number of ranks


class Script(NamedTuple):
    page: Path
    name: str
    ranks: list[int]
    fails: bool
    needs: str
    code: str


class Command(NamedTuple):
    page: Path
    line: str
    shown: list[str]
    mark: str


def read(page):
    """Return the scripts and the commands of a page."""
    scripts, commands = [], []
    for block in BLOCK.finditer(page.read_text()):
        mark, text = block["mark"] or "", textwrap.dedent(block["text"])
        if block["kind"] in ("console", "bash"):
            assert not mark or OTHER.fullmatch(mark), mark
            # A line that ends with a backslash continues in the next one.
            parts = re.split(r"^\$ ", text.replace("\\\n", ""), flags=re.M)[1:] or [text]
            commands += [Command(page, *split(part), mark) for part in parts]
        elif mark.startswith("not run: "):
            continue
        elif mark:
            scripts += begin(page, SCRIPT.fullmatch(mark), text, block["kind"])
        else:
            assert scripts, f"{page.name}: this belongs to no script: {text[:60]}"
            scripts[-1] = scripts[-1]._replace(code=f"{scripts[-1].code}\n{text}")
    return scripts, commands


def begin(page, mark, text, kind):
    ranks = [int(n) for n in (mark["ranks"] or str(ALONE)).split()]
    script = Script(page, mark["name"], ranks, mark[0].endswith(", fails"), mark["needs"] or "", text)
    if kind == "python":
        return [script]
    before = script._replace(name=f"before_{script.name}", ranks=[ALONE], code=side(text, without="+"))
    return [before, script._replace(code=side(text, without="-"))]


def side(difference, without):
    """Return one side of a difference: the lines that do not begin with a sign."""
    return "".join(f"{line[1:]}\n" for line in difference.splitlines() if not line.startswith(without))


def split(part):
    line, _, shown = part.partition("\n")
    return line, shown.splitlines()


SCRIPTS = [script for page in PAGES for script in read(page)[0]]
COMMANDS = [command for page in PAGES for command in read(page)[1]]
JOBS = [(script, ranks) for script in SCRIPTS for ranks in script.ranks]
MARKED = [command for command in COMMANDS if command.mark == "run"]
NAMES = {(script.page, script.name) for script in SCRIPTS}


def started_by(command):
    """Return the number of ranks and the script of its page that a command starts, or None."""
    started = re.search(r"(?:^|mpiexec -n (\d+) )python (\w+\.py)$", command.line)
    found = started and (int(started[1] or ALONE), started[2])
    return found if found and (command.page, found[1]) in NAMES else None


def prints(line, shown):
    """Return whether a line of the page matches a printed line; an ellipsis in it matches anything."""
    return re.search(r"[ \t]+".join(".*".join(map(re.escape, w.split("…"))) for w in shown.split()), line)


def check(shown, printed):
    for line in shown:
        if line.strip(" …"):
            assert any(prints(each, line) for each in printed.splitlines()), f"not printed: {line}\n{printed}"


def run(command, folder):
    """Run a reader's command, with a PATH that begins with this environment; return its status and its output."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environ,
        text=True,
        timeout=220,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return job.returncode, job.stdout


@pytest.mark.parametrize(("script", "ranks"), JOBS, ids=[f"{s.page.stem}-{s.name}-{n}" for s, n in JOBS])
def test_script(tmp_path, script, ranks):
    if script.needs:
        pytest.importorskip(script.needs)
    (tmp_path / script.name).write_text(script.code)
    commands = [each for each in COMMANDS if each.page == script.page and started_by(each) == (ranks, script.name)]
    start = f"mpiexec -n {ranks} " if ranks != ALONE else ""
    line = next((each.line for each in commands if not each.mark), f"{start}python {script.name}")
    status, printed = run(line, tmp_path)
    assert bool(status) == script.fails, printed
    for command in commands:
        check(command.shown, printed)


@pytest.mark.parametrize("command", MARKED, ids=[f"{c.page.stem}-{c.line[:40]}" for c in MARKED])
def test_command(tmp_path, command):
    status, printed = run(command.line, tmp_path)
    assert not status, printed
    check(command.shown, printed)


def test_each_command_that_starts_a_script_of_its_page_is_tried():
    tried = {(script.page, ranks, script.name) for script, ranks in JOBS}
    started = [(c.page, *started_by(c)) for c in COMMANDS if started_by(c) and not c.mark]
    assert started
    assert set(started) <= tried


def test_each_command_is_run_or_says_why_not():
    silent = [f"{c.page.relative_to(ROOT)}: {c.line}" for c in COMMANDS if not c.mark and not started_by(c)]
    assert not silent, "\n".join(silent)


def test_a_line_of_the_page_stands_for_what_was_printed():
    assert prints("epoch       main/loss", "epoch  main/loss")
    assert prints("rank 0: accuracy 0.93", "rank 0: accuracy 0.9…")
    assert not prints("rank 0: accuracy 0.83", "rank 0: accuracy 0.9…")
