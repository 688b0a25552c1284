"""The benchmark's arguments, statistics and table."""

import dataclasses
import json
import math
import os
import types

import pytest
from mpi4py import MPI

from mn_comm.building_blocks import STRATEGIES
from mn_tools.bench import machines, measure, report
from mn_tools.bench.contestants import MPI_ALLREDUCE, Entrants, Gradients
from mn_tools.bench.options import parse, to_bytes

WHERE = machines.Machines((machines.Node("one", 2, 4), machines.Node("two", 3, 2)), "MPICH 5", "5.0", "shared memory")


def make_report(seconds, **fields):
    made = report.Report(WHERE, report.HOST, 1, **fields)
    made.rows = report.rows_of(1000, 5, {MPI_ALLREDUCE: [0.01], **{name: [s] for name, s in seconds.items()}})
    return made


@pytest.mark.parametrize(
    "version, name",
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: today\n\0", "MPICH Version: 5.0.2"),
        ("Open MPI v5.0.11, package: Open MPI user@host\0", "Open MPI v5.0.11"),
    ],
)
def test_the_name_of_the_library(version, name):
    assert machines._library(version) == name


def test_every_communicator_is_measured_by_default():
    assert parse([]).strategies == tuple(STRATEGIES)


@pytest.mark.parametrize(
    "text, nbytes", [("8", 8), ("4K", 4096), ("64m", 64 << 20), ("64MiB", 64 << 20), ("4G", 4 << 30)]
)
def test_bytes(text, nbytes):
    assert to_bytes(text) == nbytes


def test_default_sizes_go_from_a_few_bytes_to_the_largest():
    assert parse([]).sizes == (8, 64, 512, 4096, 32768, 262144, 2 << 20, 16 << 20, 64 << 20)
    assert parse(["--max-bytes", "600"]).sizes == (8, 64, 512, 600)
    assert parse(["--max-bytes", "512"]).sizes == (8, 64, 512)
    assert parse(["--sizes", "4K,8,8"]).sizes == (8, 4096)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--sizes", "5"], "multiple of 4 up to 4G, such as 512, 4K or 64M; got '5'"),
        (["--sizes", "8,"], "got ''"),
        (["--sizes", "-8"], "expected"),
        (["--sizes", "K"], "got 'K'"),
        (["--max-bytes", "5G"], "got '5G'"),
        (["--max-bytes", "0"], "got '0'"),
        (["--sizes", "8", "--max-bytes", "8"], "not allowed with"),
        (["--strategies", "flat,ring"], "got 'ring'"),
        (["--rounds", "0"], "at least 1, got '0'"),
        (["--rounds", "many"], "at least 1, got 'many'"),
        (["--arrays", "3", "--sizes", "8"], "at least one element for each of 3 arrays, got 8 bytes"),
        (["--ranks", "1"], "at least 2, got '1'"),
        (["--json", "/no/such/folder/file"], "cannot write to /no/such/folder/file"),
        (["--json", "/tmp"], "cannot write to /tmp"),
        (["--plot", "chart.txt"], "ends in .png, .pdf, .svg; got chart.txt"),
        (["--frobnicate"], "unrecognized arguments"),
    ],
)
def test_wrong_arguments(argv, message, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # whether matplotlib is installed or not
    with pytest.raises(SystemExit) as end:
        parse(argv)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_may_not_be_written(tmp_path, capsys, monkeypatch):
    (tmp_path / "old.json").touch()
    monkeypatch.setattr("os.access", lambda path, mode: os.path.isdir(path))
    with pytest.raises(SystemExit):
        parse(["--json", str(tmp_path / "old.json")])
    assert "cannot write to" in capsys.readouterr().err
    assert parse(["--json", str(tmp_path / "new.json")]).json == str(tmp_path / "new.json")


def test_a_chart_without_matplotlib_names_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse(["--plot", "chart.png"])
    assert "pip install 'mn-tools[plot]'" in capsys.readouterr().err


def test_bandwidths_are_those_of_nccl_tests():
    row, _ = report.rows_of(1 << 20, 4, {"flat": [0.3, 0.1, 0.2], MPI_ALLREDUCE: [0.4, 0.1, 0.5]})
    assert (row.strategy, row.seconds, row.fastest, row.rounds) == ("flat", 0.2, 0.1, 3)
    assert row.algorithm_bandwidth == pytest.approx((1 << 20) / 0.2)
    assert row.bus_bandwidth == pytest.approx((1 << 20) / 0.2 * 1.5)
    assert row.ratio == pytest.approx(0.5)


@pytest.mark.parametrize(
    "seconds, best",
    [
        ({"flat": 0.005, "hierarchical": 0.0054}, "hierarchical"),  # considered equal
        ({"flat": 0.005, "hierarchical": 0.006}, "flat"),
        ({"flat": 0.005, "dummy": 0.001}, "flat"),
        ({"two_dimensional": 0.005, "non_cuda_aware": 0.004}, "two_dimensional"),
        ({"non_cuda_aware": 0.004}, "non_cuda_aware"),
        ({"dummy": 0.001}, None),
        ({}, None),
    ],
)
def test_what_is_recommended(seconds, best):
    row = report.recommended(make_report(seconds))
    assert (row and row.strategy) == best


def test_the_largest_size_counts_and_wrong_results_do_not():
    made = make_report({"flat": 0.005, "hierarchical": 0.001})
    made.rows += report.rows_of(2000, 5, {MPI_ALLREDUCE: [0.1], "flat": [0.2], "hierarchical": [0.3]})
    assert report.recommended(made).strategy == "flat"
    made.wrong = [("flat", 1000)]
    assert report.recommended(made).strategy == "hierarchical"


def test_the_table_says_all():
    made = make_report(
        {"flat": 0.005},
        latencies={"barrier": 2.5e-6},
        refusals={"single_node": "two nodes"},
        wrong=[("naive", 4096)],
        notes=["by messages"],
    )
    text = "\n".join(report.to_lines(made))
    for part in (
        "5 ranks on 2 nodes: one (2 ranks, 4 cores), two (3 ranks, 2 cores)",
        "WARNING: 3 ranks share 2 cores on two",
        "note: by messages",
        "2.50 µs",
        "cannot run here: single_node: two nodes",
        "WRONG RESULT: naive, 4 KiB",
        "for 1000 B of gradients choose flat (5.00 ms, 2.00 times as fast as MPI_Allreduce)",
    ):
        assert part in text
    assert "on one:" not in text
    line = next(line for line in text.splitlines() if line.startswith("flat"))
    assert line.split() == ["flat", "5.00", "ms", "0.000", "0.000", "0.50"]


def test_the_figures_as_json():
    made = make_report({"flat": 0.005}, refusals={"pure_nccl": "no GPU"})
    figures = json.loads(json.dumps(report.to_json(made)))
    assert figures["recommended"] == "flat"
    assert figures["machines"]["ranks"] == 5
    assert figures["machines"]["nodes"][1] == {"host": "two", "ranks": 3, "cores": 2}
    assert figures["rows"][1] == dataclasses.asdict(made.rows[1])
    assert figures["refusals"] == {"pure_nccl": "no GPU"}


@pytest.mark.parametrize(
    "seconds, text",
    [(1.234e-6, "1.23 µs"), (0.0005, "500.0 µs"), (0.0999, "99.9 ms"), (1.5, "1.50 s"), (0.9999, "999.9 ms")],
)
def test_units_of_time(seconds, text):
    assert report.human_seconds(seconds) == text


@pytest.mark.parametrize("nbytes, text", [(8, "8 B"), (1536, "1536 B"), (4096, "4 KiB"), (64 << 20, "64 MiB")])
def test_units_of_size(nbytes, text):
    assert report.human_bytes(nbytes) == text


def test_how_often():
    assert [measure.repeats(n) for n in (4, 64 << 10, 1 << 20)] == [50, 4, 1]


@pytest.mark.parametrize("rounds, seconds, expected", [(20, 0.1, 20), (20, 1.0, 10), (20, 100.0, 3), (2, 100.0, 2)])
def test_rounds_end_with_the_time(monkeypatch, rounds, seconds, expected):
    now = [-seconds]  # the round that is not counted ends at 0

    def run():
        now[0] += seconds

    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    found = measure.take_turns(MPI.COMM_SELF, {"": measure.Turn(run)}, rounds, 10.0, least=3, together=1)
    assert found == {"": [pytest.approx(seconds)] * expected}


def test_contestants_take_turns():
    ran = []
    turns = {name: measure.Turn(lambda name=name: ran.append(name)) for name in "ab"}
    seconds = measure.take_turns(MPI.COMM_SELF, turns, 3, math.inf, together=2)
    assert "".join(ran) == "aabb" * 4  # one round to warm up
    assert {name: len(each) for name, each in seconds.items()} == {"a": 3, "b": 3}


def test_gradients_of_several_arrays():
    gradients = Gradients(40, 3, device=False)
    sizes = [param.data.size for _, param in gradients.namedparams()]
    assert sum(sizes) == 10
    assert max(sizes) - min(sizes) == 1
    names = [name for name, _ in gradients.namedparams()]
    assert names == sorted(names)


def test_a_wrong_result_is_noticed(monkeypatch):
    monkeypatch.setenv("CHAINERMN_STALL_SECONDS", "0")  # no thread, which would remain for the other tests
    entrants = Entrants(MPI.COMM_SELF, ["flat"])
    try:
        entrants.communicators["flat"].multi_node_mean_grad = lambda model: [
            param.grad.fill(3) for _, param in model.namedparams()
        ]
        entrants.turns(Gradients(40, 1, device=False), 40)
        assert entrants.wrong == [("flat", 40)]
    finally:
        entrants.close()
