"""The output of the hook for an exception."""

import sys

import pytest

from mn_guard import global_except_hook


class Recorder:
    def __init__(self):
        self.texts = []

    def write(self, text):
        self.texts.append(text)

    def flush(self):
        pass


@pytest.fixture
def shown(monkeypatch):
    """Call the hook with an exception that a function raises; return what it writes, and the line for the witness."""

    def show(function, previous=sys.__excepthook__):
        recorder, lines = Recorder(), []
        monkeypatch.setattr(sys, "stderr", recorder)
        monkeypatch.setattr(global_except_hook, "_rank", lambda: 3)
        monkeypatch.setattr(global_except_hook, "abort_when_read", lambda status, line: lines.append(line))
        try:
            function()
        except BaseException as error:
            raised = error
        # Called after the except block, because Python does not call the hook within one.
        global_except_hook._AbortAllRanks(previous)(type(raised), raised, raised.__traceback__)
        (line,) = lines
        return recorder.texts, line

    return show


def raising(error):
    raise error


def test_a_traceback_is_written_as_one_text(shown):
    # When it was written in pieces, as Python does, the output of another rank cut its lines in two.
    (text,), line = shown(lambda: raising(FileExistsError("a text\nof two lines")))
    assert text.startswith("Traceback (most recent call last):\n")
    assert "\nFileExistsError: a text\nof two lines\n\nchainermn: uncaught exception on rank 3 (" in text
    assert text.endswith("): ending all ranks\n")
    assert line == "uncaught exception: FileExistsError: a text\nof two lines"


class WithNotes(ValueError):
    __notes__ = ("a note", "another: WithNotes")


def test_the_line_is_the_message_and_not_a_note(shown):
    _, line = shown(lambda: raising(WithNotes("why")))
    assert line.endswith("WithNotes: why")


def test_the_line_about_an_error_of_syntax(shown):
    _, line = shown(lambda: exec("a b"))
    assert line == "uncaught exception: SyntaxError: invalid syntax"


class Hostile(Exception):
    def __getattr__(self, name):
        raise RuntimeError(name)


def test_an_exception_that_cannot_be_looked_at_ends_the_job_all_the_same(shown):
    (text,), line = shown(lambda: raising(Hostile("why")))
    assert "in raising" in text
    assert text.endswith("): ending all ranks\n")
    assert "Hostile" in line


def test_a_previous_hook_that_fails_hides_nothing(shown):
    (text,), _ = shown(lambda: raising(ValueError("why")), previous=lambda *_: raising(KeyError("the hook fails")))
    assert text.index("KeyError: 'the hook fails'") < text.index("ValueError: why") < text.index("ending all ranks")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_wait_that_fails_hides_nothing(shown, monkeypatch, error):
    # A rank had died, or Ctrl-C was pressed: neither traceback nor message were shown.
    monkeypatch.setattr(global_except_hook, "_let_the_right_rank_end", lambda value: raising(error()))
    (text,), line = shown(lambda: raising(ValueError("why")))
    assert text.index("ValueError: why") < text.index("ending all ranks")
    assert line == "uncaught exception: ValueError: why"
