"""The examples of the reference, run on two ranks; and a check that every public name has one."""

import re
from pathlib import Path

import chainermn
import pytest

import mn_comm

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
# These cannot be shown on two ranks, or are kept for old scripts.
WITHOUT = {"DataSizeError", "get_epoch_trigger", "get_n_iterations_for_one_epoch", "add_hook_if_enabled", "get_device"}


def test_examples_run(mpiexec):
    printed = mpiexec(2, ROOT / "tests/jobs/reference_examples.py", *PAGES)
    found = re.findall(r"^rank (\d): (\d+) texts with examples$", printed, re.M)
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    assert {int(number) > 40 for _, number in found} == {True}


def called_by_users():
    """Yield what users call: functions and classes of chainermn, and the methods of a communicator that talk."""
    modules = ["datasets", "extensions", "functions", "iterators", "links", "optimizers", "global_except_hook"]
    for module in [chainermn, *(getattr(chainermn, name) for name in modules)]:
        for name in module.__all__:
            if callable(getattr(module, name)) and not name.startswith("_") and name not in WITHOUT:
                yield f"{module.__name__}.{name}", getattr(module, name)
    for name, method in vars(mn_comm.CommunicatorBase).items():
        if getattr(method, "__isabstractmethod__", False) or name in ("allgather_obj", "scatter_obj"):
            yield f"chainermn.CommunicatorBase.{name}", method


CALLED = dict(called_by_users())
ENTRY = re.compile(r"^\.\. auto\w+:: (?:\S+\.)?(\w+)\n(.*?)(?=^\.\. auto|^```|\Z)", re.M | re.S)
# If the examples are not in the docstrings.
SHOWN = {name for page in PAGES for name, text in ENTRY.findall(page.read_text()) if ">>>" in text}


@pytest.mark.parametrize("name", CALLED)
def test_what_users_call_has_an_example(name):
    short = name.rpartition(".")[2]
    # Each method of the class has one.
    assert short in SHOWN or ">>>" in CALLED[name].__doc__ or short == "CommunicatorBase"
