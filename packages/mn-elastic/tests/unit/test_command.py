"""The supervisor's command line, its commands, and its reaction to messages; without ranks."""

import json
import selectors
import signal
import socket
import sys

import pytest

from mn_elastic.supervision import supervisor
from mn_elastic.supervision.attempt import Attempt
from mn_elastic.supervision.launch import command_of, environment_of, left, own_address, ranks_on, reachable, spares_on
from mn_elastic.supervision.options import Host, Options, parse, read_hosts
from mn_guard.supervised import start
from mn_tools.doctor.mpi import Launcher

MPICH, OPEN_MPI = Launcher("/m/mpiexec", "MPICH", "5.0.2"), Launcher("/o/mpiexec", "Open MPI", "5.0.11")
PYTHON = [sys.executable, start.__file__]


def parsed(*arguments):
    return parse(list(arguments), "elastic", "")


def test_what_is_behind_the_script_is_the_scripts():
    options = parsed("-n", "4", "--hosts", "a:3,b", "--min", "2", "train.py", "-n", "7", "--hosts", "c")
    assert options.command == ("train.py", "-n", "7", "--hosts", "c")
    assert (options.ranks, options.least, options.hosts) == (4, 2, (Host("a", 3), Host("b", 2)))


def test_a_module_needs_two_hyphens():
    assert parsed("-n", "1", "--", "-m", "package").command == ("-m", "package")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2"], "expected a script to run, got none"),
        (["-n", "1", "a.py", ":", "-n", "1", "b"], "expected a script to run, got several, separated by :"),
        (["-n", "2", "--min", "3", "a.py"], "expected 1 <= --min <= -n, got --min 3 and -n 2"),
        (["-n", "2", "--restart", "-1", "a.py"], "expected 0 or more for --restart, got -1"),
        (["-n", "2", "--spares", "-1", "a.py"], "expected 0 or more for --spares, got -1"),
        (["-n", "2", "--detect", "0.1", "a.py"], "expected at least 0.5 seconds for --detect, got 0.1"),
        (["-n", "2", "--detect", "nan", "a.py"], "expected at least 0.5 seconds for --detect, got nan"),
        (["-n", "2", "--start-limit", "0", "a.py"], "expected a number of seconds above 0, got 0"),
        (["-n", "2", "--hosts", "a:0", "a.py"], "expected hosts as a:2,b:2 for --hosts, got 'a:0'"),
        (["-n", "2", "--hosts", ",", "a.py"], "expected hosts as a:2,b:2 for --hosts, got ','"),
        (["-n", "2", "--hosts", "", "a.py"], "expected hosts as a:2,b:2 for --hosts, got ''"),
        (["-n", "2", "--mpiexec", "", "a.py"], "expected a command for --mpiexec, got ''"),
        (["-n", "2", "--mpiexec", "'mpiexec", "a.py"], 'expected a command for --mpiexec, got "\'mpiexec"'),
        (["-n", "2", "--ssh", " ", "a.py"], "expected a command for --ssh, got ' '"),
        (["-n", "2", "--hosts", "a,a", "a.py"], "expected each host once in --hosts, got 'a,a'"),
        (["-n", "4", "--min", "3", "--hosts", "a:1,b:1", "a.py"], "expected room for at least 3 ranks on --hosts"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert message in capsys.readouterr().err


def test_ranks_are_shared_out_where_no_number_is_given():
    assert read_hosts(" a, b:1 ,c", 5) == (Host("a", 2), Host("b", 1), Host("c", 2))


HOSTS = (Host("a", 2), Host("b", 2))


def test_there_are_as_many_ranks_as_asked_for_and_fit():
    options = Options(3, ("t.py",), HOSTS)
    assert [ranks_on(options, hosts) for hosts in (HOSTS, HOSTS[:1], ())] == [3, 2, 0]
    assert ranks_on(Options(3, ("t.py",)), ()) == 3


def test_spares_wait_where_ranks_leave_room():
    options = Options(3, ("t.py",), HOSTS, spares=2)
    assert [spares_on(options, hosts) for hosts in (HOSTS, HOSTS[:1], ())] == [1, 0, 0]
    assert spares_on(Options(3, ("t.py",), spares=2), ()) == 2
    assert " -n 4 " in " ".join(command_of(options, OPEN_MPI, HOSTS))
    assert environment_of(options, HOSTS) == {"CHAINERMN_SPARES": "1"}
    assert parsed("-n", "3", "--spares", "1", "--hosts", "a,b", "t.py").hosts == HOSTS


def test_open_mpi_looks_for_ranks_that_are_silent():
    command = command_of(parsed("-n", "3", "--detect", "2", "t.py"), OPEN_MPI, ())
    assert command[1:] == [
        *("--stdin", "none", "--with-ft", "ulfm"),
        *("--mca", "mpi_ft_detector", "true", "--mca", "mpi_ft_detector_thread", "true"),
        *("--mca", "mpi_ft_detector_period", "0.5", "--mca", "mpi_ft_detector_timeout", "2"),
        *("-n", "3", *PYTHON, "t.py"),
    ]


def test_the_command_of_each_launcher():
    options = Options(4, ("t.py", "-e", "2"), HOSTS, mpiexec=("mpiexec", "--verbose"))
    script = [*PYTHON, "t.py", "-e", "2"]
    assert command_of(options, MPICH, HOSTS[1:]) == ["/m/mpiexec", "--verbose", "-n", "2", "-hosts", "b:2", *script]
    where = ["--host", "a:2,b:2", "-x", "CHAINERMN_SUPERVISOR", "-x", "CHAINERMN_SPARES"]
    tolerant = ["--stdin", "none", "--with-ft", "ulfm"]
    assert command_of(options, OPEN_MPI, HOSTS) == ["/o/mpiexec", "--verbose", *tolerant, "-n", "4", *where, *script]
    assert command_of(Options(4, ("t.py",)), MPICH, ()) == ["/m/mpiexec", "-n", "4", *PYTHON, "t.py"]


def test_an_option_for_the_standard_input_is_not_given_twice():
    command = command_of(Options(4, ("t.py",), mpiexec=("mpiexec", "--stdin", "all")), OPEN_MPI, ())
    assert command[1:6] == ["--stdin", "all", "--with-ft", "ulfm", "-n"]


def test_both_launchers_reach_hosts_as_the_supervisor_does():
    assert environment_of(Options(1, ("t.py",)), ()) == {"CHAINERMN_SPARES": "0"}
    environ = environment_of(Options(1, ("t.py",), ssh=("ssh", "-p", "22")), ())
    assert environ["HYDRA_LAUNCHER_EXEC"] == environ["PRTE_MCA_plm_ssh_agent"] == "ssh -p 22"


def test_a_host_that_does_not_answer_is_not_used(tmp_path):
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\n[ "$1" = there ] && exec true\nexit 255\n')
    agent.chmod(0o755)
    options = Options(2, ("t.py",), (Host("there", 1), Host("gone", 1)), ssh=(str(agent),))
    assert reachable(options, ("127.0.0.1", 9)) == (Host("there", 1),)


def test_a_silent_host_is_asked_only_if_the_others_are_too_few(tmp_path):
    agent, asked = tmp_path / "agent", tmp_path / "asked"
    agent.write_text(f'#!/bin/sh\necho "$1" >>{asked}\n')
    agent.chmod(0o755)
    hosts = tuple(Host(name, 2) for name in ("me@a.x", "b.x", "b.y", "c.x"))

    def found(least, *silent):
        asked.write_text("")
        left_over = left(Options(8, ("t.py",), hosts, least, ssh=(str(agent),)), ("127.0.0.1", 9), silent)
        return left_over, len(asked.read_text().split())

    assert found(1) == (hosts, 4)
    assert found(6, "a", "c.x.z") == (hosts, 2 + 4)
    assert found(4, "a", "c.x.z") == (hosts[1:3], 2)
    assert found(1, "b", "other") == (hosts, 4)  # the name fits two hosts


def test_without_other_hosts_it_listens_to_this_one_alone():
    assert own_address(()) == own_address([Host("localhost", 2)]) == "127.0.0.1"


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b"])
def test_a_name_that_means_no_host_is_passed_over(name):
    wrong, right = Host(name, 1), Host("me@127.0.0.2", 1)
    assert own_address([wrong, right]) == own_address([right, wrong]) == "127.0.0.1"
    message = f"expected at least one host in --hosts whose name leads to an IPv4 address, got {name}"
    with pytest.raises(SystemExit, match=message):
        own_address([Host("localhost", 1), wrong])


def heard(*messages):
    """Return the state of an attempt with two ranks after some messages, of a rank or of a process with a name."""
    attempt = Attempt(1, 2)
    for op, rank, more in messages:
        name = f"{rank}{more.get('process', '')}"
        attempt.hear({"op": op, "attempt": 1, "rank": rank, **more, "process": name}, f"host{rank}")
    return attempt


STARTED = [("start", 0, {}), ("start", 1, {})]
JOINED = [("join", 0, {"size": 2}), ("join", 1, {"size": 2})]


def test_all_ranks_have_to_come_to_the_end():
    once = heard(*JOINED, ("finished", 0, {"elastic": False}))
    assert not once.is_finished
    assert once.status == 1
    assert "1 of 2 have reached the end" in once.reason
    assert heard(*JOINED, *(("finished", rank, {"elastic": False}) for rank in range(2))).is_finished


def test_of_elastic_ranks_one_stands_for_all_that_are_left():
    attempt = heard(*JOINED, ("gone", 0, {}), ("finished", 1, {"elastic": True}))
    assert attempt.is_finished
    assert attempt.status == 0


def test_the_status_is_that_of_a_rank_that_has_failed():
    attempt = heard(*JOINED, ("failed", 1, {"status": 3, "summary": "exit status 3"}), ("gone", 0, {}), ("gone", 1, {}))
    assert attempt.is_over
    assert attempt.status == 3
    assert attempt.reason == "rank 1: exit status 3"


def test_it_is_over_when_ranks_say_so_although_one_is_stopped():
    attempt = heard(*JOINED, ("failed", 1, {"status": 1, "summary": "only 1 of 2 is left"}), ("over", 1, {}))
    assert set(attempt.present) == {"0", "1"}
    assert attempt.is_over
    assert not attempt.is_finished


def test_a_rank_of_the_attempt_before_does_not_count():
    attempt = heard(*JOINED)
    attempt.hear({"op": "gone", "attempt": 0, "rank": 0, "process": "0"}, "host0")
    assert attempt.present == {"0": "host0", "1": "host1"}


def of_both(op, **more):
    return [(op, rank, more) for rank in range(2)]


FINISHED_BY_CHILDREN = [
    *STARTED,
    *of_both("join", size=2, process="child"),
    *of_both("finished", elastic=False, process="child"),
    *of_both("gone", process="child"),
]


def test_what_ends_in_a_child_is_the_training_if_nothing_comes_after_it():
    attempt = heard(*FINISHED_BY_CHILDREN)
    assert attempt.is_finished
    assert not attempt.n_exiting
    assert attempt.trains_in_children  # the ranks go on
    assert not attempt.is_over
    assert not attempt.early
    assert attempt.continues
    attempt = heard(*FINISHED_BY_CHILDREN, *of_both("gone"))
    assert attempt.is_over
    assert not attempt.continues
    assert not attempt.early
    assert attempt.status == 0


def test_an_elastic_rank_may_continue_after_its_child_but_a_lost_one_does_not():
    lost = [*STARTED, *of_both("join", size=2, process="child"), ("gone", 1, {"process": "child"})]
    finished = ("finished", 0, {"elastic": True, "process": "child"}), ("gone", 0, {"process": "child"})
    attempt = heard(*lost, *finished)
    assert attempt.is_finished
    assert attempt.continues
    attempt = heard(*lost, *finished, ("gone", 0, {}))
    assert attempt.is_finished
    assert not attempt.continues
    assert attempt.present == {"1": "host1"}  # it may be stopped


def test_the_launcher_says_how_ranks_have_ended_whose_children_have_trained():
    attempt = heard(*FINISHED_BY_CHILDREN, *of_both("gone"))
    attempt.launched = 3
    assert not attempt.is_finished
    assert attempt.status == 3
    assert attempt.reason == "ranks have reached the end of the script, but mpiexec has ended with status 3"


def test_without_the_status_of_the_launcher_a_failure_in_another_child_counts():
    failed = [("join", 1, {"size": 2, "process": "another"})]
    failed += [("failed", 1, {"process": "another", "status": 3, "summary": "exit status 3"})]
    attempt = heard(*FINISHED_BY_CHILDREN, *failed, ("gone", 1, {"process": "another"}), *of_both("gone"))
    assert not attempt.is_finished
    assert attempt.status == 3
    attempt.launched = 0
    assert attempt.is_finished


def test_a_communicator_of_the_rank_itself_makes_the_end_of_its_child_void():
    joined = heard(*FINISHED_BY_CHILDREN, *JOINED)
    assert not joined.is_finished
    assert not joined.is_over
    assert not joined.trains_in_children
    late_child = heard(*FINISHED_BY_CHILDREN, *JOINED, *of_both("finished", elastic=True, process="child"))
    assert not late_child.is_finished
    assert heard(*FINISHED_BY_CHILDREN, *JOINED, *of_both("finished", elastic=False)).is_finished


def test_another_child_changes_nothing_that_the_first_has_done():
    attempt = heard(*FINISHED_BY_CHILDREN, *of_both("join", size=2, process="another"))
    assert attempt.is_finished
    assert attempt.trains_in_children
    assert not attempt.is_over
    assert not attempt.n_exiting


def test_a_small_status_of_the_launcher_counts_of_which_no_rank_knows():
    attempt = heard(*STARTED, *JOINED, *of_both("finished", elastic=False), *of_both("gone"))
    attempt.launched = 3
    assert not attempt.is_finished
    assert attempt.status == 3
    for signal_of_a_rank in (137, 11):
        attempt.launched = signal_of_a_rank
        assert attempt.is_finished


def test_a_status_that_becomes_0_in_a_process_is_1():
    failed = heard(*JOINED, ("failed", 1, {"status": 256, "summary": "os._exit(256)"}), *of_both("gone"))
    assert failed.status == 1


def test_a_rank_that_has_closed_its_connection_may_come_again():
    attempt = heard(*STARTED, ("gone", 0, {}))
    assert attempt.problem_at_start == "rank 0 has ended before it had made a communicator"
    assert not heard(*STARTED, ("gone", 0, {}), ("join", 0, {"size": 2, "process": "again"})).problem_at_start


@pytest.mark.parametrize(("rank", "size"), [(2, 3), (0, 1), (1, 2)])
def test_the_child_of_a_rank_may_be_part_of_another_job(rank, size):
    attempt = heard(*STARTED, *JOINED, ("join", rank, {"size": size, "process": "child"}))
    assert not attempt.verdict
    assert attempt.joined == {0: "0", 1: "1"}


@pytest.mark.parametrize("size", [1, 2])
def test_what_the_child_of_a_rank_with_a_communicator_says_does_not_count(size):
    failed = ("failed", 0, {"process": "child", "status": 7, "summary": "it is no rank"})
    child = [("join", 0, {"process": "child", "size": size}), failed, ("over", 0, {"process": "child"})]
    child += [("finished", rank, {"process": "child", "elastic": True}) for rank in range(2)]
    attempt = heard(*STARTED, *JOINED, *child, ("gone", 0, {"process": "child"}))
    assert attempt.joined == {0: "0", 1: "1"}
    assert not attempt.finished
    assert not attempt.failures
    assert not attempt.is_over
    assert set(attempt.present) == {"0", "1"}


def test_another_job_that_ranks_have_started_is_the_training_if_they_have_no_communicator():
    of_child = {"process": "child"}
    joined = [*STARTED, ("join", 0, {"size": 3, **of_child})]
    assert heard(*joined).is_together
    assert not heard(*joined).is_finished
    ended = [*joined, ("finished", 0, {"elastic": False, **of_child}), ("gone", 0, of_child)]
    attempt = heard(*ended)
    assert attempt.is_finished
    assert attempt.continues
    assert not attempt.problem_at_start
    attempt = heard(*ended, *of_both("gone"))
    assert attempt.status == 0
    assert not attempt.continues
    attempt.launched = 3
    assert attempt.status == 3
    assert not heard(*ended, *JOINED).is_finished


def test_nothing_is_awaited_of_a_host_whose_keeper_has_ended():
    attempt = heard(*STARTED, *JOINED, *of_both("finished", elastic=False))
    assert attempt.n_exiting == 2
    attempt.forget("host1")
    assert attempt.n_exiting == 1


def test_it_is_over_when_all_ranks_have_ended_before_their_communicators():
    assert heard(*STARTED, *of_both("gone")).is_over
    assert not heard(*STARTED, ("gone", 0, {})).is_over


def test_a_rank_that_is_alone_in_its_job_ends_the_attempt():
    attempt = heard(*STARTED, ("join", 0, {"size": 1}), ("finished", 0, {"elastic": False}), ("gone", 0, {}))
    assert not attempt.is_finished
    assert attempt.status == 1
    assert attempt.reason.startswith("expected ranks of a job of size 2, got rank 0 of 1: mpiexec has ended, or ")


def test_nobody_has_joined():
    attempt = Attempt(1)
    assert not attempt.is_over
    assert attempt.reason == "no rank has made a communicator"


@pytest.fixture
def signals():
    """Lets this process react to signals as before, after a supervisor has run in it."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("options", [{"spares": 1}, {"detect": 2.0}])
def test_neither_spares_nor_detection_without_open_mpi(options, monkeypatch, signals):
    monkeypatch.setattr(supervisor, "identify", lambda *_: MPICH)
    refused = r"expected Open MPI's mpiexec with --\w+ \d, got MPICH's \(/m/mpiexec\)"
    with (
        supervisor.Supervisor(Options(2, ("t.py",), mpiexec=("/m/mpiexec",), **options)) as made,
        pytest.raises(SystemExit, match=refused),
    ):
        made.run()


class LauncherOfAQuickJob:
    """A launcher that ends while the supervisor does not listen; its only rank has come and gone since."""

    def __init__(self, address, token):
        self._address = address
        self._greeting = {"op": "keeper", "token": token, "host": "here"}
        self.keeper = None

    def poll(self):
        if self.keeper is None:
            rank = {"attempt": 1, "rank": 0, "process": 0, "size": 1, "elastic": False}
            said = [self._greeting, *({"op": op, **rank} for op in ("join", "finished", "gone"))]
            self.keeper = socket.create_connection(self._address)
            self.keeper.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in said))
        return 0


def test_what_was_sent_before_the_launcher_ended_counts():
    with supervisor.Supervisor(Options(1, ("t.py",))) as made:
        made._attempt = Attempt(1, 1)
        launcher = LauncherOfAQuickJob(made._listening.getsockname()[:2], made._token)
        made._watch(launcher)
        assert made._attempt.is_finished
        launcher.keeper.close()


def test_a_keeper_may_be_lost_while_another_one_is_heard():
    """Both have sent something; the answer to the first finds that the second one has ended."""
    here, there = socket.socketpair()
    with supervisor.Supervisor(Options(1, ("t.py",))) as made, here, there:
        made._hear(here)  # it is none of the keepers any more
        assert not made._attempt.lost


@pytest.mark.parametrize(
    ("said", "host", "is_lost"),
    [
        (JOINED, "host1", True),
        ([*JOINED, ("gone", 1, {})], "host1", True),
        (JOINED, "other", False),
        (STARTED, "other", True),  # its ranks may not have reported yet
    ],
    ids=["ranks", "ranks that have gone", "none", "none so far"],
)
def test_the_end_of_a_keeper_matters_if_the_attempt_has_or_awaits_ranks_on_its_host(said, host, is_lost):
    here, there = socket.socketpair()
    with supervisor.Supervisor(Options(2, ("t.py",))) as made:
        made._attempt = heard(*said)
        made._keepers[here] = keeper = supervisor._Keeper()
        made._selector.register(here, selectors.EVENT_READ, made._hear)
        keeper.host = host
        there.close()
        made._listen()
        assert made._attempt.lost == ([f"{host} is lost: its keeper has ended"] if is_lost else [])


def test_each_rank_that_ends_early_is_given_time():
    """A process that it has started may make a communicator in its place."""
    with supervisor.Supervisor(Options(2, ("t.py",))) as made:
        attempt = made._attempt = heard(*STARTED, ("gone", 0, {}))
        assert made._problem_at_start(1.0) == ""
        attempt.hear({"op": "join", "attempt": 1, "rank": 0, "size": 2, "process": "child"}, "host0")
        assert made._problem_at_start(1.3) == ""
        attempt.hear({"op": "gone", "attempt": 1, "rank": 1, "process": "1"}, "host1")
        assert made._problem_at_start(5.0) == ""
        assert made._problem_at_start(5.0 + supervisor._EARLY_SECONDS + 0.1)
