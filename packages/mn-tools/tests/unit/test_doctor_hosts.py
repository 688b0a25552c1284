"""The doctor's checks of other hosts, which a stand-in for ssh simulates on this one."""

import sys

import pytest

from mn_tools.doctor import hosts, inventory
from mn_tools.doctor.mpi import Launcher
from mn_tools.doctor.options import Options

THERE = "203.0.113.1"  # an address that no host has (RFC 5737)
# Runs the command here: options, the host, one string for a shell.
RUN = 'while [ "${1#-}" != "$1" ]; do shift; done\nshift\n'


@pytest.fixture
def look(machine):
    """Check a host that ssh, replaced by a script, is supposed to reach."""

    def look(script=None, *, host=THERE, ssh=("ssh",), seconds=30.0, launcher=None):
        if script is not None:
            machine.command("ssh", RUN + script)
        options = Options(hosts=(host,), ssh=ssh, seconds=seconds)
        return [check for check in hosts.check(options, launcher) if check.group != "Hosts"]

    return look


def codes(checks):
    return [check.code for check in checks]


def test_a_host_like_this_one(machine, look, monkeypatch):
    monkeypatch.setattr(inventory.socket, "gethostname", lambda: "localhost")
    checks = look('exec sh -c "$*"')
    assert [(check.name, check.code) for check in checks] == [
        ("name", ""),
        ("ssh", ""),
        ("same Python", ""),
        ("same packages", ""),
    ]
    assert "mpi4py" in checks[-1].found


def test_ssh_is_told_not_to_ask(machine, look):
    machine.command("ssh", 'echo "$@" > "$0.log"; exit 255')
    look()
    said = (machine.bin / "ssh.log").read_text()
    assert said.startswith(f"-oBatchMode=yes -oConnectTimeout=10 {THERE} {sys.executable} - ")


def test_another_command_than_ssh(machine, look):
    agent = machine.command("agent", 'shift\nexec "$0.next" "$@"')
    machine.command("agent.next", RUN + 'exec sh -c "$*"')
    checks = look("exit 255", ssh=(agent, "first"), host="known-to-the-agent.invalid")
    assert [check.code for check in checks[:3]] == ["", "", ""]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_host_is_not_asked(look, host):
    checks = look("exit 255", host=host)
    assert codes(checks) == ["", ""]
    assert checks[-1].found == "it is this host"


def test_a_host_without_an_address(look):
    (check,) = look("exit 0", host="no-such-host.invalid")
    assert check.code == "host-unresolved"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("root@203.0.113.1: Permission denied (publickey,password).", "ssh-password"),
        ("Host key verification failed.", "ssh-host-key"),
        ("ssh: connect to host 203.0.113.1 port 22: Connection refused", "ssh-unreachable"),
        ("ssh: connect to host 203.0.113.1 port 22: No route to host", "ssh-unreachable"),
        ("ssh: Could not resolve hostname node7: Name or service not known", "host-unresolved"),
    ],
)
def test_what_ssh_complains_of(look, said, code):
    *_, check = look(f"echo '{said}' >&2; exit 255")
    assert check.code == code
    assert said in check.found


def test_ssh_that_hangs(look):
    *_, check = look("exec sleep 300", seconds=0.5)
    assert check.code == "ssh-hangs"
    assert f"{THERE} true" in check.advice


def test_no_ssh(machine, look):
    machine.path_without_commands()
    *_, check = look()
    assert check.code == "ssh-missing"


def test_no_python_there(look):
    *_, check = look("exec sh -c '/nowhere/python -'")
    assert check.code == "host-python-missing"
    assert sys.executable in check.advice


def test_python_that_fails_there(look):
    *_, check = look("echo no space left on device >&2; exit 1")
    assert check.code == "host-python-fails"
    assert "no space left" in check.found


def test_another_python_there(machine, look):
    machine.at_start("sys.version_info = (3, 9, 1)")
    assert "host-python-differs" in codes(look('exec sh -c "$*"'))


def there(machine, code):
    """Run code at the start of Python, but only on the other host."""
    machine.module("there/sitecustomize", code)
    return f'PYTHONPATH={machine.site / "there"} exec sh -c "$*"'


def test_another_numpy_there(machine, look):
    machine.distribution("numpy", "1.26.4", machine.site / "there")
    check = next(check for check in look(there(machine, "")) if check.name == "same packages")
    assert check.code == "host-package-differs"
    assert "numpy 1.26.4, here " in check.found


def test_a_package_that_is_missing_there(machine, look):
    hide = "import importlib.metadata as m\nall = m.distributions\n"
    hide += "m.distributions = lambda: [d for d in all() if d.metadata['Name'] != 'mpi4py']"
    check = next(check for check in look(there(machine, hide)) if check.name == "same packages")
    assert (check.code, check.found) == ("host-package-missing", "not there: mpi4py")


def test_a_module_that_is_missing_there(machine, look):
    hide = "import importlib.util as u\nfind = u.find_spec\n"
    hide += "u.find_spec = lambda name, *more: None if name == 'mn_comm' else find(name, *more)"
    check = next(check for check in look(there(machine, hide)) if check.name == "same packages")
    assert check.code == "host-package-missing"
    assert "mn_comm" in check.found


@pytest.mark.parametrize(("family", "helper"), [("MPICH", "hydra_pmi_proxy"), ("Open MPI", "prted")])
def test_no_launcher_there(machine, look, family, helper):
    launcher = Launcher(machine.mpiexec("exit 0", family), family, "9.8.7")
    path = machine.command(helper, "exit 0")
    found = look(f'rm -f {path}; exec sh -c "$*"', launcher=launcher)
    assert "host-launcher-missing" in codes(found)
    assert path in next(check.found for check in found if check.code == "host-launcher-missing")


def test_names_that_are_unknown_there(machine, look):
    deaf = "import socket\ndef deaf(*a, **k): raise socket.gaierror('no')\nsocket.getaddrinfo = deaf"
    *_, check = look(there(machine, deaf))
    assert check.code == "host-resolves-not"
    assert inventory.take("", [])["host"] in check.found


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.1.1", ["own-name-loopback"]), ("::1", ["own-name-loopback"])]
)
def test_an_own_name_that_means_nothing_elsewhere(address, expected):
    assert codes(hosts.check_own_name("node1", address)) == expected
    assert codes(hosts.check_own_name("node1", "10.0.0.5")) == []
    assert codes(hosts.check_own_name("node1", "")) == []
