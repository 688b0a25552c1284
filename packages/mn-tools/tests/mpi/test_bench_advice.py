"""Recommendations, measured in this job."""

import json
import sys
import types

import numpy as np
import pytest
from mpi4py import MPI

from mn_tools.bench import advise, main, measure, rehearsal

pytestmark = pytest.mark.sizes(4)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size

several = pytest.mark.skipif(SIZE < 2, reason="there is nothing to measure on one rank")
SHORT = ["--seconds", "1"]


class Model:
    def __init__(self, *shapes):
        self.params = [types.SimpleNamespace(data=np.zeros(shape, np.float32), grad=None) for shape in shapes]

    def namedparams(self):
        return ((f"/{i}", param) for i, param in enumerate(self.params))


@pytest.fixture
def run(capfd, monkeypatch):
    """Return a function that runs the command, and returns the status and the output of rank 0."""
    monkeypatch.setattr(rehearsal, "_CALIBRATION_SECONDS", 0.02)
    monkeypatch.setattr(measure, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(advise, "_COMPUTE_SECONDS", 0.01)

    def run(*argv):
        status = main([*argv, *SHORT])
        written = WORLD.bcast(capfd.readouterr())
        assert set(WORLD.allgather(status)) == {status}
        return status, *written

    return run


@pytest.fixture
def script(monkeypatch):
    """Return a module that stands for a user's script."""
    module = types.ModuleType("a_script")
    monkeypatch.setitem(sys.modules, "a_script", module)
    module.model = lambda: Model((30, 20), (30,))
    return module


@several
def test_what_to_choose(run, tmp_path):
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("100x50\n100\n10x100\n")
    status, text, errors = run("--model", WORLD.bcast(str(shapes)), "--compute", "2ms", "--json")
    assert (status, errors) == (0, "")
    figures = json.loads(text)
    assert (figures["machines"]["ranks"], figures["bytes"], figures["compute_seconds"]) == (SIZE, 24400, 0.002)
    names = [f"{each['communicator']} {each['when']}" for each in figures["choices"]]
    assert len(set(names)) == len(names)
    for when in ("DuringBackward()", "OneStepLate()", "AfterBackward(send=Int8())", "DuringBackward(send=TopK(0.01))"):
        assert f"hierarchical {when}" in names
    for when in ("LocalSGD(4)", "LocalSGD(16)", "DiLoCo(32)", "DuringBackward(send=PowerSGD())"):
        assert f"hierarchical {when}" in names
    assert all(each["step_seconds"] > 0 for each in figures["choices"])
    exact, overall = figures["recommended"]["same_training"], figures["recommended"]["any"]
    assert exact["same_training"]
    assert overall["step_seconds"] <= exact["step_seconds"] * 1.1
    for each in (exact, overall):
        assert each["from"] == "whole steps"
        assert each in figures["choices"]


@several
def test_a_function_as_model_and_one_that_computes(run, script):
    calls = []
    script.step = lambda model: calls.append(len(model.params))
    status, text, errors = run("--model", "a_script:model", "--compute", "a_script:step", "--strategies", "flat,dummy")
    assert (status, errors) == (0, "")
    assert set(calls) == {2}
    assert len(calls) >= 5
    assert "a_script:model: 0.00252 MB in 2 arrays" in text
    assert 'create_communicator("flat")' in text
    assert "hierarchical" not in text


@several
def test_a_communicator_that_cannot_compress(run, script):
    status, text, errors = run("--model", "a_script:model", "--compute", "1ms", "--strategies", "naive,dummy,pure_nccl")
    assert (status, errors) == (0, "")
    assert "cannot run here: pure_nccl" in text
    assert "Nothing that changes the training is clearly faster." in text
    status, text, errors = run("--model", "a_script:model", "--compute", "1ms", "--strategies", "dummy")
    assert (status, text) == (2, "")
    assert "no communicator to recommend: got dummy" in errors


@several
def test_ranks_with_different_models(run, script):
    script.model = lambda: Model((RANK + 1, 2))
    status, text, errors = run("--model", "a_script:model", "--compute", "1ms")
    assert (status, text) == (2, "")
    assert "expected the same shapes of arrays in --model a_script:model on every rank" in errors
    assert errors.count("mn_comm bench: ") == 1


@several
@pytest.mark.parametrize("where", ["model", "step"])
def test_a_function_that_fails_on_one_rank(run, script, where):
    def fail(*_):
        if RANK == SIZE - 1:
            raise KeyError("no data here")
        return Model((3, 2))

    script.step = lambda model: None
    setattr(script, where, fail)
    status, text, errors = run("--model", "a_script:model", "--compute", "a_script:step")
    assert (status, text) == (2, "")
    assert "a_script" in errors
    assert "no data here" in errors


@several
def test_a_model_that_is_not_there(run):
    status, _, errors = run("--model", "no_such_module:model", "--compute", "1ms")
    assert status == 2
    assert "--model no_such_module:model: ModuleNotFoundError" in errors
    status, _, errors = run("--model", "resnet", "--compute", "1ms")
    assert status == 2
    assert "expected mlp, resnet50, transformer, package.module:function, or a file" in errors


@several
def test_parameters_without_arrays(run, script):
    script.model = lambda: Model((3, 2), (4,))
    original = script.model

    def uninitialised():
        model = original()
        model.params[1].data = None
        return model

    script.model = uninitialised
    status, _, errors = run("--model", "a_script:model", "--compute", "1ms")
    assert status == 2
    assert "expected initialised parameters, got /1 without an array: call the model once before" in errors


@several
def test_parameters_without_elements(run, script):
    script.model = lambda: Model((0, 2))
    status, _, errors = run("--model", "a_script:model", "--compute", "1ms")
    assert status == 2
    assert "expected a model with arrays of floats, found none" in errors
