"""The doctor's output and its command line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mn_tools import doctor
from mn_tools.doctor import options, problems, report
from mn_tools.doctor.report import Status

TESTS = Path(__file__).parents[1]
FINE = report.ok("MPI", "library", "MPICH 5")
BAD = problems.problem("mpiexec-missing", "MPI", "mpiexec", "there is none on PATH", python="/usr/bin/python3")
DOUBTFUL = problems.problem("mpiexec-unknown", "MPI", "mpiexec", "it does not say which MPI library it belongs to")


def test_every_problem_has_a_test_that_provokes_it():
    texts = "".join(path.read_text() for path in TESTS.glob("*/test_doctor*.py") if path != Path(__file__))
    assert {code for code in problems.problem.codes if f'"{code}"' not in texts} == set()


@pytest.mark.parametrize("columns", [40, 80, 100, 300])
def test_lines_are_not_wider_than_the_terminal(columns):
    found = "a long story " * 20 + "\nsecond line"
    check = problems.problem("mpiexec-missing", "MPI", "mpiexec", found, python="python3")
    lines = report.as_text(check, columns).splitlines()
    assert max(map(len, lines)) <= max(60, min(columns, 110))
    assert lines[0].startswith("  failure  mpiexec ")
    assert "[mpiexec-missing]" in " ".join(lines)
    assert sum("-> install an MPI library" in line for line in lines) == 1


def test_a_path_stays_in_one_piece():
    path = "/a-rather/long-path/" + "x" * 120
    assert path in report.as_text(report.ok("MPI", "library", f"MPICH, {path}"), 80).split()


@pytest.mark.parametrize(
    ("checks", "expected"),
    [([], Status.OK), ([FINE], Status.OK), ([FINE, DOUBTFUL], Status.WARNING), ([BAD, DOUBTFUL, FINE], Status.FAILURE)],
)
def test_the_worst_counts(checks, expected):
    assert report.worst(checks) is expected


def test_the_last_line_counts():
    assert report.summary([FINE, FINE, BAD]) == "2 OK, 0 warnings, 1 failure\n"


def test_json_has_the_documented_form():
    whole = json.loads(report.as_json([FINE, BAD], {"program": "mn_comm", "ranks": 2, "hosts": []}))
    assert list(whole) == ["format", "status", "program", "ranks", "hosts", "checks"]
    assert (whole["format"], whole["status"]) == (1, "failure")
    fine, bad = whole["checks"]
    assert fine == {
        "group": "MPI", "name": "library", "status": "ok", "found": "MPICH 5", "code": None, "advice": None
    }  # fmt: skip
    assert (bad["status"], bad["code"]) == ("failure", "mpiexec-missing")
    assert "/usr/bin/python3 -m pip" in bad["advice"]


def test_a_code_that_nobody_knows_is_a_mistake():
    with pytest.raises(KeyError):
        problems.problem("no-such-code", "MPI", "mpiexec", "")


def test_codes_are_words():
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code) for code in problems.problem.codes)


HOSTFILE = """
# for MPICH
node1:4
node2

node3 slots=4   # for Open MPI
node1:4
10.0.0.5:2
fe80::1:2
"""


def test_a_file_of_hosts():
    assert options.read_hostfile(HOSTFILE) == ("node1", "node2", "node3", "10.0.0.5", "fe80::1:2")


def test_hosts_in_a_row(tmp_path):
    assert options.parse(["--hosts", "a, b:2,,a"], "doctor", "").hosts == ("a", "b")
    file = tmp_path / "hosts"
    file.write_text("x\n")
    assert options.parse(["--hostfile", str(file)], "doctor", "").hosts == ("x",)
    assert options.parse(["--ssh", "rsh -q 'a b'"], "doctor", "").ssh == ("rsh", "-q", "a b")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ranks", "0"],
        ["--timeout", "0"],
        ["--timeout", "inf"],
        ["--ssh", ""],
        ["--ssh", "ssh -o 'a"],
        ["--hosts", ""],
        ["--hosts", " ,"],
        ["--hostfile", sys.executable],
        ["--hostfile", "/nowhere"],
        ["--hostfile", "/dev/null"],
        ["--hosts", "a", "--hostfile", "b"],
        ["nonsense"],
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        options.parse(arguments, "doctor", "")
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(("checks", "status"), [([FINE, DOUBTFUL], 0), ([FINE, BAD], 1)])
def test_exit_status(checks, status, monkeypatch, capsys, machine):
    monkeypatch.setattr(doctor, "examine", lambda options, more: iter(checks))
    assert doctor.main([]) == status
    text = capsys.readouterr().out
    assert text.count("\nMPI\n") == 1
    assert doctor.main(["--json"]) == status
    assert len(json.loads(capsys.readouterr().out)["checks"]) == 2


def test_as_a_rank_it_refuses(machine, capsys):
    machine.setenv("PMI_RANK", "1")
    assert doctor.main([]) == 2
    assert "without mpiexec" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "written"),
    [
        (["--help"], 0, "Check whether this machine"),
        ([], 2, "usage: python -m mn_comm {bench,doctor,"),
        (["nonsense"], 2, "usage: "),
        (["doctor", "--help"], 0, "--hostfile"),
        (["bench", "--help"], 0, "--ranks"),
    ],
)
def test_commands(arguments, status, written):
    process = subprocess.run([sys.executable, "-m", "mn_comm", *arguments], capture_output=True, text=True)
    assert process.returncode == status
    assert written in process.stdout + process.stderr
