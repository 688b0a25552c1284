"""Which package gets the name ``chainermn``."""

import sys
from importlib.machinery import SourceFileLoader

import pytest

from mn_compat import ownership
from mn_compat.activation import activate


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """A stand-in for the package chainermn-meta, first on the path."""
    home = tmp_path / "chainermn_meta"
    (home / "chainermn" / "functions").mkdir(parents=True)
    (home / "__init__.py").write_text("raise AssertionError('this package is located, not imported')\n")
    (home / "chainermn" / "__init__.py").write_text("implementation = 'ours'\n")
    (home / "chainermn" / "functions" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("CHAINERMN_IMPL", raising=False)
    return tmp_path


@pytest.fixture
def absent(monkeypatch):
    """No package of ours, even if the environment has it."""
    monkeypatch.setattr(ownership, "HOME", "a_package_nobody_has")
    monkeypatch.delenv("CHAINERMN_IMPL", raising=False)


@pytest.mark.parametrize("choice", [None, "", "ours"])
def test_ours_is_found_where_it_is_installed(ours, monkeypatch, choice):
    if choice is not None:
        monkeypatch.setenv("CHAINERMN_IMPL", choice)
    spec = activate().find_spec("chainermn")
    assert spec.origin == str(ours / "chainermn_meta" / "chainermn" / "__init__.py")
    assert spec.submodule_search_locations == [str(ours / "chainermn_meta" / "chainermn")]
    assert isinstance(spec.loader, SourceFileLoader)
    assert "chainermn_meta" not in sys.modules or not hasattr(sys.modules["chainermn_meta"], "implementation")


def test_a_folder_without_our_package_is_not_taken_for_it(ours):
    (ours / "chainermn_meta" / "chainermn" / "__init__.py").unlink()
    assert activate().find_spec("chainermn") is None


def test_bundled_leaves_the_name_alone(ours, monkeypatch):
    monkeypatch.setenv("CHAINERMN_IMPL", "bundled")
    assert activate().find_spec("chainermn") is None


def test_without_ours_the_name_is_left_alone(absent):
    assert activate().find_spec("chainermn") is None


def test_ours_asked_for_but_not_installed_is_an_error(absent, monkeypatch):
    monkeypatch.setenv("CHAINERMN_IMPL", "ours")
    with pytest.raises(ImportError, match="CHAINERMN_IMPL is 'ours', but chainermn-meta is not installed"):
        activate().find_spec("chainermn")


def test_any_other_choice_is_an_error(ours, monkeypatch):
    monkeypatch.setenv("CHAINERMN_IMPL", "Bundled")
    with pytest.raises(ImportError, match="expecting CHAINERMN_IMPL to be 'ours' or 'bundled', got 'Bundled'"):
        activate().find_spec("chainermn")


def test_submodules_come_from_our_folder(python, ours):
    code = "import chainermn.functions as f, chainermn; print(chainermn.implementation, f.__file__)"
    process = python("-c", code, path=[ours])
    expected = ours / "chainermn_meta" / "chainermn" / "functions" / "__init__.py"
    assert process.stdout.strip() == f"ours {expected}"


def test_status_says_which_one_it_is(python, ours):
    code = "import mn_compat; s = mn_compat.status(); print(s.chainermn_is_ours, s.chainermn_path)"
    process = python("-c", code, path=[ours])
    assert process.stdout.strip() == f"True {ours / 'chainermn_meta' / 'chainermn' / '__init__.py'}"
    process = python("-c", code, path=[ours], CHAINERMN_IMPL="bundled")
    assert process.stdout.startswith("False ")
    assert "chainermn_meta" not in process.stdout


def test_the_other_chainermn_loaded_before_activation_is_an_error(python, ours):
    process = python(
        "-c",
        "import sys, types\n"
        "sys.modules['chainermn'] = types.ModuleType('chainermn')\n"
        "sys.modules['chainermn'].__file__ = '/elsewhere/chainermn/__init__.py'\n"
        "import mn_compat\n",
        path=[ours],
        check=False,
    )
    assert process.returncode == 1
    assert "chainermn was imported before mn_compat, from /elsewhere/chainermn/__init__.py instead of" in process.stderr


BUNDLED = """
import tempfile, warnings
import numpy as np, chainer, chainermn, chainer.links as L, chainer.functions as F
from chainer import training
from chainer.training import extensions

comm = chainermn.create_communicator("naive")
rs = np.random.RandomState(0)
x = rs.rand(64, 6).astype("f")
data = chainermn.scatter_dataset(chainer.datasets.TupleDataset(x, (x.sum(1) > 3).astype("i")), comm, shuffle=True)
model = L.Classifier(chainer.Sequential(L.Linear(6, 8), F.relu, L.Linear(8, 2)))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(model)
updater = training.StandardUpdater(chainer.iterators.SerialIterator(data, 8), optimizer)
with tempfile.TemporaryDirectory() as out:
    trainer = training.Trainer(updater, (2, "epoch"), out=out)
    once = chainer.iterators.SerialIterator(data, 8, repeat=False, shuffle=False)
    trainer.extend(chainermn.create_multi_node_evaluator(extensions.Evaluator(once, model), comm))
    trainer.extend(extensions.LogReport())
    trainer.run()
    log = trainer.get_extension("LogReport").log
assert len(log) == 2 and all(np.isfinite(entry["validation/main/loss"]) for entry in log), log
print(chainermn.__file__)
"""


def test_the_bundled_one_trains_on_this_stack(python):
    if python("-c", "import mpi4py.MPI", check=False).returncode:
        pytest.skip("the bundled chainermn needs mpi4py and an MPI library")
    process = python("-W", "error", "-c", BUNDLED, CHAINERMN_IMPL="bundled")
    assert "chainermn_meta" not in process.stdout
