"""The layout that the tools and the packages rely on."""

import ast
import re

import pytest

# Each may be missing, or slow to import, so it is imported only where it is needed.
IMPORTED_LATE = {"cupy", "cupyx", "nccl", "matplotlib", "scipy", "sklearn", "h5py"}


def module_name(package):
    return package.replace("-", "_")


def test_each_package_holds_one_typed_module_and_its_papers(root, packages):
    for name in packages:
        folder = root / "packages" / name
        assert [path.name for path in (folder / "src").iterdir()] == [module_name(name)]
        assert (folder / "src" / module_name(name) / "py.typed").is_file()
        assert (folder / "LICENSE").read_text() == (root / "LICENSE").read_text()
        assert (folder / "README.md").read_text().startswith(f"# {name}\n")


def test_tools_know_every_package(workspace, packages):
    tools = workspace["tool"]
    modules = [module_name(name) for name in packages]
    assert sorted(tools["uv"]["sources"]) == sorted(packages)
    assert {f"packages/{name}/src" for name in packages} <= set(tools["mypy"]["mypy_path"])
    assert sorted(tools["importlinter"]["root_packages"]) == sorted(modules)


def test_tests_lie_where_they_are_looked_for(root):
    for path in [*root.glob("packages/*/tests/**/test_*.py"), *root.glob("tests/**/test_*.py")]:
        part = path.relative_to(root).parts[path.relative_to(root).parts.index("tests") + 1]
        # Tests in cluster are started by a test in jobs, and tests in site and slurm by the sessions docs and slurm.
        assert part in {"unit", "mpi", "jobs", "elastic", "gpu", "cluster", "site", "slurm"}, path


def test_optional_and_slow_imports_are_late(root):
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        early = imported_at_once(ast.parse(path.read_text()))
        assert not early & IMPORTED_LATE, path


def imported_at_once(module):
    """Return the top-level names that a module imports when it is imported."""
    names, open_nodes = set(), list(module.body)
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_for_types_only(node):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.partition(".")[0])
        open_nodes += ast.iter_child_nodes(node)
    return names


def is_for_types_only(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


@pytest.mark.parametrize("heading", ["Try it", "Test it"])
def test_readme_has_a_command_of_one_line(root, heading):
    section = (root / "README.md").read_text().partition(f"\n## {heading}\n")[2]
    command = re.search(r"^```\w*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1]
    assert command.count("\n") == 1
    assert command.startswith("python3 tools/bootstrap.py ")
