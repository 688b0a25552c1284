"""The check of the project's prose: what it finds, and where it looks."""

import importlib.util

import pytest


@pytest.fixture
def prose(root):
    spec = importlib.util.spec_from_file_location("prose", root / "tools" / "prose.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rules(prose):
    return list(prose.read_rules(prose.WORDS.read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "Leave both away.",
        "Chainer is mended.",
        "the training is another one",
        "The first update is another one.",
        "who comes first waits here",
        "It knows nothing of Chainer.",
        "As it says.",
        "Likewise.",
        "x: As for :meth:`allreduce`.",
        "They are not of one kind.",
    ],
)
def test_what_is_not_written_is_found(prose, rules, text):
    assert list(prose.matches(prose.Line(None, 1, text), rules))


@pytest.mark.parametrize("text", ["It is recommended.", "Omit both.", "Take another one of these.", "leave it alone"])
def test_other_words_are_not(prose, rules, text):
    assert not list(prose.matches(prose.Line(None, 1, text), rules))


def test_code_in_documentation_is_not_prose(prose):
    text = "before `as ever`\n\n```python\nx = 'mended'\n```\n\nafter\n"
    lines = prose.without_code(text).splitlines()
    assert "mended" not in "".join(lines)
    assert "as ever" not in "".join(lines)
    assert (lines[0], lines[6]) == ("before code", "after")


def test_docstrings_comments_and_messages_are_prose(prose, root):
    source = '"""First."""\n\nx = 1  # second\nraise ValueError(f"third {x}")\n'
    lines = [*prose.comments(root, source), *prose.strings(root, source)]
    assert {(line.number, line.text) for line in lines} == {(1, "First."), (3, "# second"), (4, "third ")}


def test_the_project_is_read(prose, root):
    files = {str(line.file.relative_to(root)) for line in [*prose.documentation(), *prose.code()]}
    assert {"README.md", "docs/index.md", "noxfile.py", "packages/mn-comm/src/mn_comm/base.py"} <= files
