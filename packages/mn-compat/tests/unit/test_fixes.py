"""Every fix has a probe that passes with the fix and, with libraries that have the problem, fails without it."""

import importlib.util
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

import mn_compat
from mn_compat.finder import load_table
from mn_compat.fixes import FIXES
from mn_compat.substitution import apply

PROBES = Path(__file__).parent / "probes"
FAKES = Path(__file__).parent / "fakes"
NAMES = [fix.name for fix in FIXES]


def load(name):
    spec = importlib.util.spec_from_file_location(f"probe_{name}", PROBES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROBE = {name: load(name) for name in NAMES}


def fakes(name):
    return getattr(PROBE[name], "FAKES", ())


def outcomes(python, names, folders, **variables):
    lines = python(PROBES / "run.py", *names, path=[FAKES / folder for folder in folders], **variables).stdout
    return {name: (result, detail) for name, result, detail in map(json.loads, lines.splitlines())}


@pytest.fixture(scope="module")
def patched(python):
    """The outcome of every probe on the patched Chainer; probes that share their fakes share an interpreter."""
    groups = defaultdict(list)
    for name in NAMES:
        groups[fakes(name)].append(name)
    return {
        name: outcome for folders, names in groups.items() for name, outcome in outcomes(python, names, folders).items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_probe_passes_with_the_fix(patched, name):
    result, detail = patched[name]
    if result == "skipped":
        pytest.skip(detail)
    assert result in ("passed", "needless"), detail


@pytest.mark.parametrize("name", NAMES)
def test_probe_fails_without_the_fix(python, patched, name):
    result, detail = patched[name]
    if result == "skipped":
        pytest.skip(detail)
    if result == "needless":
        pytest.skip(f"the fault does not occur here: {detail}")
    result, detail = outcomes(python, [name], fakes(name), MN_COMPAT_SKIP=name)[name]
    assert result == "failed"
    assert re.search(PROBE[name].SYMPTOM, detail), detail


def test_every_probe_belongs_to_a_fix():
    assert {path.stem for path in PROBES.glob("*.py")} - {"run"} == set(NAMES)


def test_names_of_fixes_are_unique():
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("module", sorted(load_table()))
def test_patched_module_keeps_its_lines_and_compiles(module):
    path = Path(mn_compat.status().chainer_path, *module.split(".")[1:]).with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    patched = apply(load_table()[module], text, name=module, path=str(path))
    assert patched.count("\n") == text.count("\n")
    compile(patched, path, "exec")


def test_the_readme_lists_every_fix_and_its_reason():
    readme = Path(__file__).parents[2] / "README.md"
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| `", readme.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(fix.name, fix.reason) for fix in FIXES]
