"""The contents of a release, and its creation: metadata, workflows, files that contain a version or an address."""

import importlib.util
import json
import re
import subprocess

import pytest
import yaml

USED = re.compile(r"tools/bootstrap\.py -s ([\w-]+|\$\{\{ matrix\.session \}\})")


@pytest.fixture
def workflows(root):
    return {path.stem: yaml.safe_load(path.read_text()) for path in root.glob(".github/workflows/*.yml")}


@pytest.fixture
def urls(workspace):
    return workspace["project"]["urls"]


def load(root, name):
    spec = importlib.util.spec_from_file_location(name, root / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bump(root):
    return load(root, "bump")


def test_metadata_is_complete_and_says_the_same(packages, urls):
    for name, package in packages.items():
        project = package["project"]
        assert project["urls"] == urls, name
        assert project["authors"] == [{"name": "ChainerMN developers"}], name
        assert (project["license"], project["license-files"], project["readme"]) == ("MIT", ["LICENSE"], "README.md")
        assert len(project["keywords"]) >= 3, name
        assert "Topic :: Scientific/Engineering :: Artificial Intelligence" in project["classifiers"], name
        assert project["classifiers"] == sorted(project["classifiers"], key=natural), name


def natural(classifier):
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", classifier)]


def test_versions_outside_the_packages_metadata(root, workspace):
    version = workspace["project"]["version"]
    assert yaml.safe_load((root / "CITATION.cff").read_text())["version"] == version
    found = {
        path.relative_to(root): re.findall(r'^__version__ = "(.+)"$', path.read_text(), re.MULTILINE)
        for path in root.glob("packages/*/src/**/__init__.py")
    }
    said = {path: versions for path, versions in found.items() if versions}
    assert len(said) >= 2
    assert said == {path: [version] for path in said}


def test_the_address_is_everywhere_the_same(root, urls):
    repository = urls["Repository"]
    assert yaml.safe_load((root / "CITATION.cff").read_text())["repository-code"] == repository
    assert repository in (root / "CONTRIBUTING.md").read_text()
    # Any other repository with that name would be one that was forgotten.
    for path in [*root.glob("*.md"), *root.glob("*.cff"), *root.glob(".github/**/*.yml"), *root.glob("docs/*.md")]:
        for address in re.findall(r"https://github\.com/[\w-]+/chainermn\b", path.read_text()):
            assert address == repository, path


def test_workflows_run_sessions_that_there_are(root, workflows):
    sessions = set(re.findall(r'@nox\.session\(name="([\w-]+)"', (root / "noxfile.py").read_text()))
    sessions |= set(re.findall(r"@nox\.session.*\ndef (\w+)\(", (root / "noxfile.py").read_text()))
    used = set()
    for workflow in workflows.values():
        for job in workflow["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            for step in job["steps"]:
                for session in USED.findall(step.get("run", "")):
                    used |= set(matrix["session"]) if "matrix" in session else {session}
    assert {"release-check", "docs", "coverage", "lint"} <= used <= sessions


def test_workflows_are_well_formed(workflows):
    assert set(workflows) == {"ci", "docs", "release"}
    for name, workflow in workflows.items():
        assert {"name", True, "permissions", "jobs"} <= set(workflow), name  # YAML reads "on" as true
        for job in workflow["jobs"].values():
            needs = job.get("needs", [])
            assert {needs} if isinstance(needs, str) else set(needs) <= set(workflow["jobs"])
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), (name, step)
                assert re.fullmatch(r"[\w-]+(/[\w-]+)+@[\w./]+", step.get("uses", "a/b@v1")), (name, step)


def test_ci_tests_all_packages_on_all_pythons(root, workflows, packages):
    matrix = workflows["ci"]["jobs"]["test"]["strategy"]["matrix"]
    assert set(matrix["package"]) == {*packages, "product"}
    (listed,) = re.findall(r"^PYTHONS = \[(.+)\]$", (root / "noxfile.py").read_text(), re.MULTILINE)
    assert matrix["python"] == re.findall(r"[\d.]+", listed)


def test_only_publishing_may_write(workflows):
    jobs = workflows["release"]["jobs"]
    assert workflows["release"]["permissions"] == {"contents": "read"}
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}  # trusted publishing: no token is stored anywhere
    assert jobs["pypi"]["environment"] == "pypi"
    assert set(jobs["pypi"]["needs"]) == {"build", "install"}
    assert "secrets." not in json.dumps(workflows["release"])


def test_image_copies_what_there_is(root):
    text = (root / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert {"cpu", "cuda"} <= set(stages)
    for options, source in re.findall(r"^COPY ((?:--\S+ )*)(\S+) ", text, re.MULTILINE):
        if "--from=" not in options:
            assert (root / source).exists(), source


def test_settings_of_editors_and_hooks(root, lock, packages):
    container = json.loads((root / ".devcontainer" / "devcontainer.json").read_text())
    assert "tools/bootstrap.py" in container["postCreateCommand"]
    locked = {package["name"]: package["version"] for package in lock["package"]}
    hooks = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())["repos"]
    versions = {hook["id"].partition("-")[0]: repo["rev"] for repo in hooks for hook in repo["hooks"]}
    assert versions == {"ruff": f"v{locked['ruff']}", "mypy": f"v{locked['mypy']}"}, "run nox -s lock, and edit it"
    mypy = next(hook for repo in hooks for hook in repo["hooks"] if hook["id"] == "mypy")
    assert {argument.split("/")[1] for argument in mypy["args"]} == set(packages)


@pytest.fixture
def project(tmp_path):
    """A project of two packages, in Git."""
    (tmp_path / "packages" / "a" / "src" / "a").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nversion = "8.0.0a1"\n[project.urls]\nRepository = "https://example.org/old"\n'
        'Documentation = "https://old.github.io/old/"\n'
    )
    pins = 'version = "8.0.0a1"\ndependencies = ["b==8.0.0a1", "c==8.0.0a10", "d==18.0.0a1"]\n'
    (tmp_path / "packages" / "a" / "pyproject.toml").write_text(pins)
    (tmp_path / "packages" / "a" / "src" / "a" / "__init__.py").write_text('__version__ = "8.0.0a1"\n')
    (tmp_path / "CITATION.cff").write_text("version: 8.0.0a1\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n- Something new. See https://example.org/old/1\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    return tmp_path


def test_a_version_is_changed_everywhere(bump, project, capsys):
    bump.main(["8.0.0"], project)
    pins = (project / "packages" / "a" / "pyproject.toml").read_text()
    assert pins == 'version = "8.0.0"\ndependencies = ["b==8.0.0", "c==8.0.0a10", "d==18.0.0a1"]\n'
    assert (project / "packages" / "a" / "src" / "a" / "__init__.py").read_text() == '__version__ = "8.0.0"\n'
    assert (project / "CITATION.cff").read_text() == "version: 8.0.0\n"
    assert re.search(r"## Unreleased\n\n## 8\.0\.0 \(\d{4}-\d\d-\d\d\)\n\n- S", (project / "CHANGELOG.md").read_text())
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_an_address_is_changed_everywhere(bump, project):
    bump.main(["--repository", "https://example.org/new/"], project)
    assert "https://example.org/new/1" in (project / "CHANGELOG.md").read_text()
    assert 'Repository = "https://example.org/new"' in (project / "pyproject.toml").read_text()


def test_the_pages_follow_the_repository(bump, project):
    bump.main(["--repository", "https://github.com/Somebody/else"], project)
    text = (project / "pyproject.toml").read_text()
    assert 'Repository = "https://github.com/Somebody/else"' in text
    assert 'Documentation = "https://somebody.github.io/else/"' in text


@pytest.mark.parametrize(
    "version", ["8", "v8.0.0", "8.0.0-beta", "next", "08.0.0", "8.0.0a01", "\uff18.0.0", "8.0.0a1"]
)
def test_what_is_no_version(bump, project, version):
    with pytest.raises(SystemExit, match=f"got '{version}'"):
        bump.main([version], project)


@pytest.mark.parametrize("address", ["", "somewhere", "git@github.com:a/b.git", "https://github.com/a/b.git"])
def test_what_is_no_address(bump, project, address):
    before = contents(project)
    with pytest.raises(SystemExit, match=re.escape(f"got {address!r}")):
        bump.main(["--repository", address], project)
    assert contents(project) == before


def test_nothing_is_changed_if_the_changelog_cannot_be(bump, project):
    (project / "CHANGELOG.md").write_text("# Changelog\n")
    before = contents(project)
    with pytest.raises(SystemExit, match="expected one heading"):
        bump.main(["8.0.0"], project)
    assert contents(project) == before


def contents(project):
    return {path: path.read_text() for path in project.rglob("*") if path.is_file() and ".git" not in path.parts}


def test_the_pages_have_commands_to_install_by(root):
    tool = load(root, "try_install")
    blocks = [tool.commands((root / page).read_text(), heading) for page, heading in tool.PAGES.items()]
    for block in blocks:
        assert block.splitlines()[0] == "python3 -m venv .venv"
        assert re.search(
            "^pip install --upgrade pip$", block, re.MULTILINE
        )  # the pip of Debian 12 has no --build-constraint
        assert "./packages/*" in block
    with pytest.raises(SystemExit, match="expected a block of commands"):
        tool.commands("# A page\n", "## Install it")
