"""``python -m chainermn doctor``, started as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("chainermn")


def examine(*command):
    command = [*(command or (sys.executable, "-m", "chainermn")), "doctor", "--json", "--timeout=60"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=70)
    assert process.stdout.startswith("{"), process.stdout + process.stderr
    whole = json.loads(process.stdout)
    codes = {check["code"] for check in whole["checks"]} - {None}
    return process.returncode, {code for code in codes if not code.startswith("shm-")}, whole


@pytest.mark.parametrize("command", [(PROGRAM,), *((sys.executable, "-m", m) for m in ("chainermn", "chainermn_meta"))])
def test_a_machine_on_which_all_is_well(machine, command):
    status, codes, whole = examine(*command)
    assert (status, codes) == (0, set())
    assert whole["program"] == "chainermn"
    assert {"Python", "MPI", "Ranks", "Chainer"} <= {check["group"] for check in whole["checks"]}


def test_it_speaks_where_mpi_cannot_be_loaded(machine):
    machine.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    status, codes, whole = examine()
    assert (status, codes) == (1, {"mpi-library-setting"})
    assert {check["code"] for check in whole["checks"] if check["group"] == "Chainer"} == {None}


def test_it_speaks_where_chainer_cannot_be_imported(machine):
    machine.setenv("MN_COMPAT_SKIP", "all")
    status, codes, _ = examine()
    assert status == 1
    assert "adapter-skipped" in codes
