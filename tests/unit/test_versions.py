"""One version for all packages, and one place for the versions of everything else."""

import re

import pytest
from packaging.requirements import Requirement


@pytest.fixture
def version(workspace):
    return workspace["project"]["version"]


def test_all_packages_have_one_static_version(packages, version):
    assert {name: package["project"]["version"] for name, package in packages.items()} == dict.fromkeys(
        packages, version
    )


def test_packages_pin_one_another_to_that_version(packages, version):
    for name, package in packages.items():
        extras = package["project"].get("optional-dependencies", {})
        requirements = map(Requirement, sum(extras.values(), package["project"]["dependencies"]))
        pins = {requirement.name: str(requirement.specifier) for requirement in requirements}
        ours = {key: pin for key, pin in pins.items() if key in packages}
        assert ours == dict.fromkeys(ours, f"=={version}"), name


def test_the_extra_for_the_examples_is_what_they_are_tested_with(packages, workspace):
    groups = workspace["dependency-groups"]
    extra = packages["chainermn-meta"]["project"]["optional-dependencies"]["examples"]
    assert extra == groups["examples"] + groups["example-data"]


def test_all_packages_support_the_same_pythons(packages, workspace):
    pythons = {name: package["project"]["requires-python"] for name, package in packages.items()}
    assert pythons == dict.fromkeys(packages, workspace["project"]["requires-python"])


def test_the_pythons_that_are_declared_are_tested_and_named(root, packages):
    (listed,) = re.findall(r"^PYTHONS = \[(.+)\]$", (root / "noxfile.py").read_text(), re.MULTILINE)
    pythons = re.findall(r"[\d.]+", listed)
    prefix = "Programming Language :: Python :: "
    for name, package in packages.items():
        classifiers = package["project"]["classifiers"]
        assert [line.removeprefix(prefix) for line in classifiers if line.startswith(prefix)] == pythons, name
    for page in ("README.md", "docs/installation.md", "packages/mn-compat/README.md"):
        spans = re.findall(r"Python (?:from )?(3\.\d+) to (3\.\d+)", (root / page).read_text())
        assert set(spans) == {(pythons[0], pythons[-1])}, page


def test_lock_knows_the_packages_of_today(packages, lock, version):
    locked = {package["name"]: package for package in lock["package"]}
    for name, package in packages.items():
        wanted = {Requirement(line).name for line in package["project"]["dependencies"]}
        assert locked[name]["version"] == version
        assert {dependency["name"] for dependency in locked[name]["dependencies"]} == wanted, "run uv lock"


def test_bootstrap_installs_what_the_lock_says(root, workspace, lock):
    locked = {(package["name"], package["version"]) for package in lock["package"]}
    pinned = re.findall(r"^([\w-]+)==([^\s;]+)", (root / "tools" / "requirements.txt").read_text(), re.MULTILINE)
    assert set(pinned) <= locked, "run nox -s lock"
    wanted = {Requirement(line).name for line in workspace["dependency-groups"]["nox"]}
    assert wanted <= {name for name, _ in pinned}
