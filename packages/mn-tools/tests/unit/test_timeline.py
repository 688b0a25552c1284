"""The timeline's record, its clocks and its file, without other ranks."""

import json
import os
import threading
import warnings

import pytest

from mn_comm import span
from mn_comm.building_blocks import is_recording, operation
from mn_comm.ranks import spans
from mn_tools.timeline import clock, command, record, start, trace
from mn_tools.timeline.clock import Sample
from mn_tools.timeline.trace import Part


@pytest.fixture
def recorder(monkeypatch):
    made = record.Recorder(most=5)
    monkeypatch.setattr(spans, "_recorder", made)
    return made


def make_part(rank, events, **fields):
    known = {"host": "here", "threads": {7: "MainThread", 8: "mn_comm_0"}, "dropped": 0, "full_at": 0}
    known |= {"started": (0, 0), "samples": [Sample(0, 0, 0)]}
    return Part(rank=rank, events=events, **{**known, **fields})


def read(file):
    """Return a trace, after checking the requirements of the viewers."""
    found = json.loads(file.read_text())
    assert found["displayTimeUnit"] in ("ms", "ns")
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("X", "M", "i")
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    return found


def spans_of(found, rank=None):
    return [e for e in found["traceEvents"] if e["ph"] == "X" and rank in (None, e["pid"])]


def test_without_a_timeline_nothing_is_made():
    assert not is_recording()
    assert span("one") is span("two", of=2)
    with span("one"):
        pass


def test_spans_are_kept_as_they_end(recorder):
    @operation
    def function(x, y):
        return x + y

    with span("outer"), span("inner", bytes=3):
        pass
    assert function(1, y=2) == 3
    with pytest.raises(ValueError, match="known"), span("failing"):
        raise ValueError("known")
    assert [event[0] for event in recorder.events] == ["inner", "outer", "function", "failing"]
    inner, outer = recorder.events[:2]
    assert outer[1] <= inner[1] <= inner[2] <= outer[2]
    assert (inner[4], outer[4]) == ({"bytes": 3}, None)


def test_threads_are_told_apart(recorder):
    def work():
        with span("there"):
            pass

    with span("here"):
        thread = threading.Thread(target=work, name="mn_comm_0")
        thread.start()
        thread.join()
    there, here = recorder.events
    assert [recorder.threads[event[3]] for event in (here, there)] == ["MainThread", "mn_comm_0"]


def test_a_thread_is_not_taken_for_one_that_has_ended(recorder):
    def work():
        with span("there"):
            pass

    for name in ("first", "second", "third"):  # Python often gives them the same number
        thread = threading.Thread(target=work, name=name)
        thread.start()
        thread.join()
    assert [recorder.threads[event[3]] for event in recorder.events] == ["first", "second", "third"]


def test_a_full_record_counts_what_it_drops(recorder, tmp_path):
    for i in range(8):
        with span(str(i)):
            pass
    assert [event[0] for event in recorder.events] == list("01234")
    assert recorder.dropped == 3
    part = make_part(0, recorder.events, threads=recorder.threads, dropped=recorder.dropped, full_at=recorder.full_at)
    trace.write(str(tmp_path / "t"), [part])
    (note,) = [e for e in read(tmp_path / "t")["traceEvents"] if e["ph"] == "i"]
    assert note["name"] == "the record is full: 3 later spans are not in it"
    assert note["ts"] == (recorder.full_at - recorder.events[0][1]) / 1e3


@pytest.mark.parametrize("compared", [True, False])
def test_a_clock_that_has_run_for_years_has_nanoseconds(tmp_path, compared):
    begin = 10**18 + 1
    samples = [Sample(10**18, 1, 5), Sample(10**18 + 10**10, 1, 5)] if compared else []
    events = [("a", begin, begin + 13_471, 7, None), ("a", begin + 2, begin + 13_470, 7, None)]
    part = make_part(0, events, dropped=1, full_at=begin + 13_473, samples=samples)
    trace.write(str(tmp_path / "t"), [part])
    found = read(tmp_path / "t")
    assert [(e["ts"], e["dur"]) for e in spans_of(found)] == [(0, 13.471), (0.002, 13.468)]
    assert [e["ts"] for e in found["traceEvents"] if e["ph"] == "i"] == [13.473]


def test_the_answer_that_came_back_soonest_is_believed():
    assert clock.best_of([(0, 5000, 400), (1000, 2140, 1100), (2000, 9000, 2300)]) == Sample(2140, 1090, 50)


def test_a_clock_that_drifts():
    samples = [Sample(1000, 10, 1), Sample(3000, 30, 1)]
    assert [clock.offset_at(samples, at) for at in (1000, 2000, 3000, 5000)] == [10, 20, 30, 50]
    assert clock.offset_at(samples[:1], 5000) == 10


def test_one_trace_in_rank_0s_time(tmp_path):
    begin = 10_000_000
    # The same two moments; rank 1's clock is 7 ms ahead, and gains 10 us within 1 ms.
    first = make_part(0, [("a", begin, begin + 1_000_000, 7, None)])
    ahead = 7_000_000
    samples = [Sample(begin + ahead, ahead, 2000), Sample(begin + ahead + 1_010_000, ahead + 10_000, 3000)]
    second = make_part(1, [("a", begin + ahead, begin + ahead + 1_010_000, 8, {"bucket": 2})], samples=samples)
    trace.write(str(tmp_path / "t"), [second, first], ["a note"])
    found = read(tmp_path / "t")
    assert [(e["pid"], e["ts"], e["dur"], e.get("args")) for e in spans_of(found)] == [
        (0, 0.0, 1000.0, None),
        (1, 0.0, 1000.0, {"bucket": 2}),
    ]
    other = found["otherData"]
    assert (other["ranks"], other["clock_error_us"], other["notes"]) == ([0, 1], {"0": 0.0, "1": 3.0}, ["a note"])


def test_a_clock_that_was_never_compared_goes_by_the_wall_clock(tmp_path):
    first = make_part(0, [("a", 5000, 6000, 7, None)], started=(1000, 900_000))
    second = make_part(1, [("b", 77_000, 78_000, 7, None)], started=(72_000, 900_000), samples=[])
    trace.write(str(tmp_path / "t"), [first, second])
    found = read(tmp_path / "t")
    assert [e["ts"] for e in spans_of(found)] == [0.0, 1.0]  # 4 and 5 us after the same moment
    assert found["otherData"]["placed_by_wall_clock"] == [1]


def test_processes_and_threads_are_named(tmp_path):
    events = [("communicate", 0, 1, 8, None), ("step", 0, 1, 7, None), ("mine", 0, 1, 9, None)]
    threads = {8: "mn_comm_0", 7: "MainThread", 9: "loader"}
    trace.write(str(tmp_path / "t"), [make_part(3, events, threads=threads, host="node-b")])
    found = read(tmp_path / "t")["traceEvents"]
    named = {(e["name"], e["tid"]): e["args"] for e in found if e["ph"] == "M"}
    assert named["process_name", 0] == {"name": "rank 3 on node-b"}
    assert [named["thread_name", i]["name"] for i in range(3)] == ["main thread", "communication thread", "loader"]
    assert {e["name"]: e["tid"] for e in found if e["ph"] == "X"} == {"step": 0, "communicate": 1, "mine": 2}


def test_steps_are_numbered_and_what_lies_between_is_shown(tmp_path):
    events = [("forward", 1000, 2000, 7, None), ("step", 1000, 4000, 7, None), ("step", 9000, 9500, 7, None)]
    trace.write(str(tmp_path / "t"), [make_part(0, events)])
    found = {(e["name"], e.get("args", {}).get("number")): (e["ts"], e["dur"]) for e in spans_of(read(tmp_path / "t"))}
    assert found == {
        ("forward", None): (0, 1),
        ("step", 0): (0, 3),
        ("between steps", None): (3, 5),
        ("step", 1): (8, 0.5),
    }


def test_details_that_json_cannot_write_are_shown_as_text(tmp_path):
    trace.write(str(tmp_path / "t"), [make_part(0, [("a", 0, 1, 7, {"shape": (2, 3), "dtype": float})])])
    assert spans_of(read(tmp_path / "t"))[0]["args"] == {"shape": [2, 3], "dtype": "<class 'float'>"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {(1, 2): 3}, [[float("nan")]]])
def test_details_that_json_has_no_form_for_spoil_nothing(tmp_path, value):
    part = make_part(0, [("a", 0, 1, 7, {"one": value, "other": 2}), ("b", 0, 1, 7, None)])
    for each in (part, Part.from_bytes(part.to_bytes())):
        trace.write(str(tmp_path / "t"), [each])
        text = (tmp_path / "t").read_text()
        found = json.loads(text, parse_constant=pytest.fail)
        assert spans_of(found)[0]["args"] == {"one": str(value), "other": 2}


def test_a_part_survives_the_way():
    part = make_part(2, [["a", 1, 2, 7, {"bucket": 1}]], dropped=4, full_at=9, started=[1, 2])
    assert Part.from_bytes(part.to_bytes()) == part


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"null", b'{"rank": 1}'])
def test_what_is_no_part(content):
    with pytest.raises(ValueError):
        Part.from_bytes(content)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    with pytest.raises(OSError):
        trace.write(str(tmp_path / "folder"), [make_part(0, [])])
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_parts_are_added_to_the_trace(tmp_path, capsys):
    file = str(tmp_path / "t.json")
    trace.write(file, [make_part(0, [("a", 5000, 6000, 7, None)])], ["missing: rank 1, rank 2"])
    for rank in (1, 2):
        samples = [Sample(0, 1000 * rank, 10)]
        trace.write_part(file, make_part(rank, [("a", 6000 + 1000 * rank, 9000, 7, None)], samples=samples))
    assert command.main([file]) == 0
    found = read(tmp_path / "t.json")
    assert [(e["pid"], e["ts"]) for e in spans_of(found)] == [(0, 0.0), (1, 1.0), (2, 1.0)]
    assert found["otherData"]["ranks"] == [0, 1, 2]
    assert found["otherData"]["notes"] == ["missing: rank 1, rank 2", "added later: rank 1, rank 2"]
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert command.main([file]) == 1
    assert "there is no" in capsys.readouterr().err


def test_parts_alone_make_a_trace(tmp_path):
    file = str(tmp_path / "t.json")
    trace.write_part(file, make_part(1, [("a", 6000, 9000, 7, None)]))
    assert command.main([file]) == 0
    assert [(e["pid"], e["ts"]) for e in spans_of(read(tmp_path / "t.json"))] == [(1, 0.0)]


@pytest.mark.parametrize("argv", [[], ["--help"], ["one", "two"]])
def test_how_parts_are_added(argv, capsys):
    assert command.main(argv) == 2
    assert "usage" in capsys.readouterr().err


def test_adding_to_another_file_is_an_error(tmp_path):
    (tmp_path / "t.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a trace"):
        trace.add(str(tmp_path / "t.json"), [make_part(0, [])])


@pytest.mark.parametrize("spoiled", ["t.json", "t.json.rank1.part"])
def test_a_file_that_is_incomplete_is_named(tmp_path, capsys, spoiled):
    trace.write(str(tmp_path / "t.json"), [make_part(0, [])])
    trace.write_part(str(tmp_path / "t.json"), make_part(1, []))
    (tmp_path / spoiled).write_text('{"rank": 1')
    assert command.main([str(tmp_path / "t.json")]) == 1
    assert f"{tmp_path / spoiled}: Expecting" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.json.rank1.part"]


@pytest.fixture
def absolute():
    start._absolute.cache_clear()
    yield start._absolute
    start._absolute.cache_clear()


def test_the_file_is_where_the_job_was_started(absolute, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("t.json") == str(tmp_path / "t.json")
    assert absolute(str(tmp_path / "t.json")) == str(tmp_path / "t.json")


@pytest.mark.parametrize("file", ["no/such/folder/t.json", "."])
def test_a_file_that_cannot_be_written_is_one_warning(absolute, tmp_path, file):
    with pytest.warns(UserWarning, match="no timeline is recorded: CHAINERMN_TIMELINE is .* cannot be written"):
        assert absolute(str(tmp_path / file)) == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert absolute(str(tmp_path / file)) == ""


def test_a_device_is_not_replaced(absolute, tmp_path):
    os.mkfifo(tmp_path / "t.json")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert absolute(str(tmp_path / "t.json")) == ""


def test_a_file_in_a_folder_that_cannot_be_written(absolute, tmp_path, monkeypatch):
    (tmp_path / "t.json").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: os.path.isfile(path))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert absolute(str(tmp_path / "t.json")) == ""
