"""The output of the hook for an exception."""

import sys

from mn_comm import global_except_hook


class Recorder:
    def __init__(self):
        self.texts = []

    def write(self, text):
        self.texts.append(text)

    def flush(self):
        pass


def test_a_traceback_is_written_as_one_text(monkeypatch):
    # When it was written in pieces, as Python does, the output of another rank cut its lines in two.
    recorder = Recorder()
    monkeypatch.setattr(sys, "stderr", recorder)
    monkeypatch.setattr(global_except_hook, "_rank", lambda: 3)
    monkeypatch.setattr(global_except_hook, "abort_when_read", lambda *_: None)
    try:
        raise FileExistsError("a text\nof two lines")
    except FileExistsError as error:
        global_except_hook._AbortAllRanks(sys.__excepthook__)(type(error), error, error.__traceback__)
    (text,) = recorder.texts
    assert text.startswith("Traceback (most recent call last):\n")
    assert "\nFileExistsError: a text\nof two lines\n\nchainermn: uncaught exception on rank 3 (" in text
    assert text.endswith("): ending all ranks\n")
