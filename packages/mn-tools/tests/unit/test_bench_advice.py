"""The arithmetic of a recommendation: the time of a step, what is recommended, and how it is shown."""

import dataclasses
import itertools
import json
import types

import numpy as np
import pytest
from mpi4py import MPI

from mn_tools.bench import advice_report, advise, machines, measure, models, rehearsal
from mn_tools.bench.advise import Advice, distinct
from mn_tools.bench.choices import SENDS, Choice, Estimate, Parts, best, expected, finalists, menu
from mn_tools.bench.models import Arrays, thin
from mn_tools.bench.options import parse, to_seconds

H, F = "hierarchical", "flat"
PARTS = Parts(
    forward=1.0,
    backward=2.0,
    update=0.5,
    alone=3.25,
    meeting=0.75,
    averages={(H, ""): 4.0, (F, ""): 6.0, (H, "Int8()"): 1.0},
    background={(H, ""): 5.0, (H, "Int8()"): 1.0},
    hidden={(H, ""): 0.5, (H, "Int8()"): 1.0},
    last=0.1,
)


def machine(*ranks):
    nodes = tuple(machines.Node(f"node{i}", n, 8) for i, n in enumerate(ranks))
    return machines.Machines(nodes, "MPICH 5", "5.0", "shared memory")


@pytest.mark.parametrize(
    "choice, seconds",
    [
        (Choice(H), 1 + 2 + 4 + 0.5),
        (Choice(F), 1 + 2 + 6 + 0.5),
        (Choice(H, "DuringBackward"), 1 + 2 + 5 + 0.5 - 0.5 * 2),  # no more than the backward pass
        (Choice(F, "DuringBackward"), 1 + 2 + 6 + 0.5 - 0.5 * 2),  # hidden as with the other communicator
        (Choice(H, "DuringBackward", "Int8()"), 1 + 2 + 1 + 0.5 - 0.9),  # not the last bucket
        (Choice(H, "OneStepLate"), 1 + 2 + 5 + 0.5 - 0.5 * 3.5),
        (Choice(H, send="Int8()"), 1 + 2 + 1 + 0.5),
        (Choice(H, "LocalSGD", steps=4), 3.25 + 4.75 / 4),
        (Choice(H, "DiLoCo", steps=32), 3.25 + 4.75 / 32),
    ],
)
def test_the_time_of_a_step(choice, seconds):
    assert expected(choice, PARTS) == pytest.approx(seconds)


def test_a_short_average_is_hidden_completely_one_step_late():
    parts = dataclasses.replace(PARTS, background={(H, ""): 0.3}, hidden={(H, ""): 1.0})
    assert expected(Choice(H, "OneStepLate"), parts) == pytest.approx(3.5)


def test_without_a_measurement_nothing_is_hidden():
    parts = dataclasses.replace(PARTS, hidden={}, background={})
    assert expected(Choice(H, "DuringBackward"), parts) == expected(Choice(H), parts)


def test_the_menu():
    choices = menu([H, F], [H])
    assert len(set(choices)) == len(choices) == 2 * 2 + 1 + 2 * len(SENDS) + 3
    exact = [choice for choice in choices if choice.is_exact]
    assert [str(choice) for choice in exact] == ["AfterBackward()", "DuringBackward()"] * 2
    for choice in choices:
        assert (choice.harm == 0) == choice.is_exact == (choice.caveat == "")
        assert choice.page.startswith("docs/")
    assert [str(choice) for choice in menu([], [F])[-3:]] == ["LocalSGD(4)", "LocalSGD(16)", "DiLoCo(32)"]
    assert str(Choice(H, "DuringBackward", "TopK(0.01)")) == "DuringBackward(send=TopK(0.01))"


def test_every_choice_is_written_as_in_a_script():
    mn_compress = pytest.importorskip("mn_compress")
    for text, compression in SENDS.items():
        written = eval(text, vars(mn_compress))
        assert type(written) is type(compression)
        if text != "PowerSGD()":  # whose exact steps at the beginning are not measured
            assert written == compression


def test_who_is_rehearsed():
    times = {Choice(H): 3.0, Choice(F): 1.5, Choice("naive"): 1.0, Choice(H, "OneStepLate"): 0.9}
    times |= {Choice(H, "DuringBackward"): 2.0, Choice("naive", "DuringBackward"): 1.7}
    times |= {Choice(H, send="Int8()"): 1.4, Choice(H, send="OneBit()"): 1.5}
    estimates = [Estimate(choice, seconds) for choice, seconds in times.items()]
    default = {Choice(H), Choice(H, "DuringBackward")}
    late = Choice(H, "OneStepLate")
    found = finalists(estimates, H, 4)
    assert len(set(found)) == len(found)
    assert set(found) == default | {Choice(F), Choice("naive"), late, Choice(H, send="Int8()")}
    assert set(finalists(estimates, H, 1)) == default | {Choice("naive"), late}


def test_who_may_still_win():
    seconds = {"a": [2.0], "b": [2.7], "late": [1.0], "one bit": [1.4], "int8": [1.2, 9.0, 1.0]}
    assert advise._ahead(seconds, {"a", "b"}) == ["a", "late", "int8"]


@pytest.mark.parametrize(
    "times, exact, overall",
    [
        ({Choice(H): 1.0, Choice(F): 1.04}, Choice(H), Choice(H)),
        ({Choice(H): 1.04, Choice(F): 1.0}, Choice(H), Choice(H)),  # equal: the first communicator
        ({Choice(H): 1.2, Choice(F): 1.0}, Choice(F), Choice(F)),
        ({Choice(H): 1.04, Choice(H, "DuringBackward"): 1.0}, Choice(H, "DuringBackward"), Choice(H, "DuringBackward")),
        ({Choice(H): 1.04, Choice(H, "OneStepLate"): 1.0}, Choice(H), Choice(H)),  # no change without a gain
        ({Choice(H): 2.0, Choice(H, "OneStepLate"): 1.0}, Choice(H), Choice(H, "OneStepLate")),
        (
            {Choice(H): 2.0, Choice(H, "DiLoCo", steps=32): 1.0, Choice(H, send="Int8()"): 1.04},
            Choice(H),
            Choice(H, send="Int8()"),  # changes the training less
        ),
    ],
)
def test_what_is_recommended(times, exact, overall):
    estimates = [Estimate(choice, 9.0, seconds) for choice, seconds in times.items()]
    assert best(estimates, [H, F], exact=True).choice == exact
    assert best(estimates, [H, F], exact=False).choice == overall


@pytest.mark.parametrize(
    "ranks, names",
    [((2,), [H, "flat", "naive"]), ((1, 1), [H, "naive"]), ((2, 2), [H, "two_dimensional", "flat", "naive"])],
)
def test_communicators_that_do_the_same_are_measured_once(ranks, names):
    assert (
        distinct(machine(*ranks), [H, "two_dimensional", "pure_nccl", "flat", "single_node", "naive", "dummy"]) == names
    )


def test_the_models():
    assert {name: round(Arrays(name, tuple(shapes)).nbytes / 1e6) for name, shapes in models.MODELS.items()} == {
        "mlp": 7,
        "resnet50": 102,
        "transformer": 50,
    }


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("share", [0.5, 0.1, 0.02])
def test_a_share_of_a_model(name, share):
    whole = Arrays(name, tuple(models.MODELS[name]))
    part = thin(whole, share)
    assert share / 2 <= part.share <= share * 2
    assert part.share == pytest.approx(part.nbytes / whole.nbytes)
    assert thin(whole, 1.0) is whole


def test_one_large_array_is_cut():
    part = thin(Arrays("one", ((1000, 10),)), 0.1)
    assert (part.shapes, part.share) == (((100, 10),), 0.1)


def test_a_scalar_is_not_cut():
    part = thin(Arrays("with a scalar", ((1000, 10), ())), 0.1)
    assert part.shapes == ((100, 10), ())


def test_shapes_in_a_file(tmp_path):
    text = tmp_path / "shapes.txt"
    text.write_text("64x3x7x7\n\n(10, 20)\n(5,)\n7\n")
    assert models._in_file(str(text)) == [(64, 3, 7, 7), (10, 20), (5,), (7,)]
    arrays = tmp_path / "model.npz"
    np.savez(arrays, **{"l/W": np.zeros((3, 2), np.float32), "n": np.zeros(4, np.int32)})
    assert models._in_file(str(arrays)) == [(3, 2)]
    text.write_text("64*3\n")
    with pytest.raises(ValueError, match=r"such as 64x3x7x7; got '64\*3'"):
        models._in_file(str(text))
    with pytest.raises(FileNotFoundError, match="expected mlp, resnet50, transformer, "):
        models._in_file("resnet")


@pytest.mark.parametrize(
    "text, seconds", [("180ms", 0.18), ("0.18s", 0.18), (".5", 0.5), ("2 s", 2.0), ("90us", 9e-5), ("90µs", 9e-5)]
)
def test_times(text, seconds):
    assert to_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--model", "mlp"], "--model needs --compute"),
        (["--compute", "1s"], "--compute needs --model"),
        (["--seconds", "9s"], "--seconds needs --model"),
        (["--model", "mlp", "--compute", "fast"], "expected a time such as 180ms or 0.18s, got 'fast'"),
        (["--model", "mlp", "--compute", "0s"], "got '0s'"),
        (["--model", "mlp", "--compute", "train:step"], "so --model has to be a function, too"),
        (["--model", "mlp", "--compute", "1s", "--sizes=8"], "--sizes does not go with --model"),
        (["--model", "mlp", "--compute", "1s", "--device"], "--device does not go with --model"),
    ],
)
def test_wrong_arguments(argv, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse(argv)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_model_and_its_computation():
    options = parse(["--model", "train:model", "--compute", "train:step", "--seconds", "20"])
    assert (options.model, options.compute, options.seconds) == ("train:model", "train:step", 20.0)


def test_the_computation_of_a_replica():
    work = rehearsal.Work(MPI.COMM_SELF)
    assert work.per_second > 0
    work.per_second = 3000.0
    replica = rehearsal.Replica(Arrays("", ((4, 4), (4,), (2, 4))), work, 1.0)
    assert (replica.forward_units, replica.backward_units) == (1000, [1000, 0, 1000])
    final = []
    replica.backward(final.append)
    assert final == replica.order == sorted(replica.order, reverse=True)
    assert all(param.grad.shape == param.data.shape for _, param in replica.namedparams())


def test_the_speed_of_a_core_that_other_programs_use(monkeypatch):
    seconds = itertools.count()  # each look at the clock takes longer than the measurement
    monkeypatch.setattr(rehearsal, "time", types.SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    assert rehearsal.Work(MPI.COMM_SELF).per_second == 10.0


def test_turns_are_longer_for_short_contestants(monkeypatch):
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: 0.0))  # all is very short
    ran = []
    turns = {"short": measure.Turn(lambda: ran.append("run"), lambda: ran.append("before"))}
    seconds = measure.take_turns(MPI.COMM_SELF, turns, 5, 0.0)
    assert len(seconds["short"]) == 2  # the time was over already
    assert ran[:3] == ["before", "run", "before"]
    assert ran.count("before") == 3
    assert ran.count("run") == 1 + 2 * measure._MOST_IN_A_TURN


def advice(**fields):
    estimates = [
        Estimate(Choice(H), 0.4, 0.3),
        Estimate(Choice(F), 0.5),
        Estimate(Choice(H, send="Int8()"), 0.2, 0.1),
        Estimate(Choice("two_dimensional", send="Int8()"), 0.2),
    ]
    made = Advice(machine(1, 1), Arrays("mlp", ((10, 10), (10,))), 0.06, 0.25, (H, F), estimates, {}, [], 30.0)
    return dataclasses.replace(made, **fields)


def test_the_report():
    lines = list(advice_report.advice_to_lines(advice()))
    text = "\n".join(lines)
    for part in (
        "mlp: 0.00044 MB in 2 arrays; forward and backward pass: 60.0 ms",
        "note: 25% of it was measured",
        "Choose this; it does not change the training (300.0 ms a step)",
        "when=AfterBackward())",
        "Or this, 3.0 times as fast (100.0 ms a step)",
        "when=AfterBackward(send=Int8()))",
        "But it adds a little rounding noise to every step. Read docs/compression.md",
    ):
        assert part in text
    rows = [line.split() for line in lines if line.startswith(("  hier", "  flat", "  two"))]
    assert rows == [
        [H, "AfterBackward()", "300.0", "ms", "█████▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒"],
        [F, "AfterBackward()", "~500.0", "ms", "█████" + "▒" * 35],
        [H, "AfterBackward(send=Int8())", "100.0", "ms", "█████▒▒▒"],
    ]


def test_where_nothing_is_faster():
    only = [each for each in advice().estimates if each.choice.is_exact]
    only.append(Estimate(Choice(H, "OneStepLate"), 0.3, 0.29))
    assert list(advice_report.advice_to_lines(advice(estimates=only)))[-1].startswith(
        "Nothing that changes the training"
    )


def test_what_changes_the_training_has_to_be_clearly_faster():
    """``LocalSGD(4)`` is about as fast as ``DiLoCo(32)``, but also as the exact average."""
    steps = {Choice(H): 1.15, Choice(H, "LocalSGD", steps=4): 1.08, Choice(H, "DiLoCo", steps=32): 1.0}
    estimates = [Estimate(choice, 9.0, seconds) for choice, seconds in steps.items()]
    exact, overall = advice_report.recommendations(advice(estimates=estimates))
    assert (exact.choice, overall.choice) == (Choice(H), Choice(H, "DiLoCo", steps=32))


def test_the_recommendation_as_json():
    figures = json.loads(json.dumps(advice_report.advice_to_json(advice())))
    assert figures["recommended"]["same_training"]["when"] == "AfterBackward()"
    assert figures["recommended"]["any"] == {
        "communicator": H,
        "when": "AfterBackward(send=Int8())",
        "same_training": False,
        "step_seconds": 0.1,
        "from": "whole steps",
        "caveat": "adds a little rounding noise to every step",
        "page": "docs/compression.md",
    }
    assert [each["from"] for each in figures["choices"]] == ["whole steps", "parts", "whole steps", "parts"]
