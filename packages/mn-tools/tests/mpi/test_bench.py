"""The benchmark, run in this job."""

import json

import pytest
from mpi4py import MPI

from mn_comm import create_communicator
from mn_tools.bench import command, contestants, measure

pytestmark = pytest.mark.sizes(1, 4)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size

several = pytest.mark.skipif(SIZE < 2, reason="there is nothing to measure on one rank")
SHORT = ["--rounds", "1", "--sizes", "8,1M"]


@several
def test_all_communicators_are_measured(run_bench):
    status, table, errors = run_bench(*SHORT)
    assert (status, errors) == (0, "")
    for size in ("8 B", "1 MiB"):
        assert sum(line.startswith(f"{size} ") for line in table.splitlines()) == 1
    for name in ("MPI_Allreduce", "naive", "flat", "hierarchical", "two_dimensional", "single_node", "dummy"):
        assert sum(line.startswith(f"{name} ") for line in table.splitlines()) == 2
    assert f"ranks 0 and {SIZE - 1}" in table
    assert "cannot run here: pure_nccl: " in table
    assert "for 1 MiB of gradients choose " in table.splitlines()[-1]


@several
def test_each_latency_is_measured_twice_where_that_takes_long(monkeypatch):
    rounds = []
    one_round = measure._one_round
    monkeypatch.setattr(measure, "_one_round", lambda *args: rounds.append(args) or one_round(*args))
    monkeypatch.setattr(command, "_LATENCY_TOGETHER", 2)
    monkeypatch.setattr(command, "_LATENCY_SECONDS", 0.0)
    latencies = command._latencies(WORLD)
    assert len(rounds) == 3 * len(latencies) == 9  # each after a round that is not counted
    assert all(seconds > 0 for seconds in latencies.values())


@several
def test_json_takes_the_place_of_the_table(run_bench):
    status, text, _ = run_bench(*SHORT, "--strategies", "flat", "--arrays", "2", "--json")
    figures = json.loads(text)
    assert (status, figures["recommended"], figures["machines"]["ranks"]) == (0, "flat", SIZE)
    assert [(row["strategy"], row["bytes"]) for row in figures["rows"]] == [
        (name, nbytes) for nbytes in (8, 1 << 20) for name in ("MPI_Allreduce", "flat")
    ]
    assert all(row["seconds"] > 0 for row in figures["rows"])


@several
def test_on_several_nodes_one_communicator_refuses(run_bench, monkeypatch):
    monkeypatch.setattr(MPI, "Get_processor_name", lambda: f"node{RANK % 2}")
    fresh = WORLD.Dup()  # it was determined before where the ranks of the other one run
    for module in (command, contestants):
        monkeypatch.setattr(module, "create_communicator", lambda name, _: create_communicator(name, fresh))
    status, table, _ = run_bench(*SHORT, "--strategies", "single_node,hierarchical")
    fresh.Free()
    assert status == 0
    assert "on 2 nodes: node0" in table
    assert "cannot run here: single_node: expected all ranks on one node, got 2 nodes" in table


@several
def test_a_wrong_result_is_the_exit_status(run_bench, monkeypatch):
    monkeypatch.setattr("mn_comm.communicators.FlatCommunicator.multi_node_mean_grad", lambda self, model: None)
    status, table, _ = run_bench(*SHORT, "--strategies", "flat,hierarchical")
    assert status == 1
    assert "WRONG RESULT: flat, 8 B" in table
    assert "choose hierarchical" in table


@pytest.mark.parametrize("argv", [["--sizes", "7"], ["--strategies", "ring"], ["--nonsense"]])
def test_wrong_arguments_are_one_message(run_bench, argv):
    status, table, errors = run_bench(*argv)
    assert (status, table) == (2, "")
    assert errors.count("error:") == 1


def test_help_is_no_error(run_bench):
    status, text, _ = run_bench("--help")
    assert status == 0
    assert "--max-bytes" in text


@pytest.mark.skipif(SIZE > 1, reason="about one rank")
def test_alone_it_says_how_it_is_started(run_bench):
    status, _, errors = run_bench()
    assert status == 2
    assert "mpiexec -n 4 python -m mn_comm bench" in errors


@several
def test_ranks_are_started_once(run_bench):
    status, _, errors = run_bench("--ranks", "2")
    assert status == 2
    assert "--ranks starts mpiexec" in errors


def test_the_started_ones_are_not_told_to_start_more():
    assert command._without_ranks(["--ranks", "3", "--rounds", "1", "--ranks=2", "--device"]) == [
        "--rounds",
        "1",
        "--device",
    ]
