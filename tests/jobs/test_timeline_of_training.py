"""The timeline of a training on two ranks."""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict

import pytest

SCRIPT = """
import sys
import numpy as np
import mn_optim
import chainer, chainer.functions as F, chainer.links as L
from mn_comm import create_communicator

class Classifier(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first, self.second, self.third = L.Linear(20, 300), L.Linear(300, 300), L.Linear(300, 10)

    def forward(self, x, t):
        return F.softmax_cross_entropy(self.third(F.relu(self.second(F.relu(self.first(x))))), t)

comm = create_communicator("hierarchical")
when = {"plain": True, "outside": True, "overlap": mn_optim.DuringBackward(bucket_bytes=100_000),
        "double": mn_optim.OneStepLate()}[sys.argv[1]]
optimizer = mn_optim.MultiNodeOptimizer(chainer.optimizers.SGD(), comm, when)
model = Classifier()
optimizer.setup(model)
random = np.random.RandomState(comm.rank)
for _ in range(5):
    x, t = random.rand(30, 20).astype("f4"), random.randint(0, 10, 30).astype("i4")
    if sys.argv[1] == "outside":
        model.cleargrads()
        model(x, t).backward()
        optimizer.update()
    else:
        optimizer.update(model, x, t)
from mn_comm.building_blocks import is_recording
if is_recording():
    from mn_tools.timeline import collect
    collect._PATIENCE_SECONDS = collect._CLOCK_SECONDS = 1e9  # a rank is not missing because the machine is busy
else:
    assert "mn_tools" not in sys.modules
"""


def train(kind, file):
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    environ = {**os.environ, "CHAINERMN_TIMELINE": str(file)}
    job = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-c", SCRIPT, kind],
        env=environ,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert (job.returncode, job.stderr) == (0, "")


class Trace:
    """A trace, by rank and name of the span."""

    def __init__(self, file):
        content = json.loads(file.read_text())
        self.error = sum(content["otherData"]["clock_error_us"].values()) + 0.002  # and what rounding does
        self.spans = [defaultdict(list), defaultdict(list)]
        for event in sorted((e for e in content["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"]):
            event["end"] = event["ts"] + event["dur"]
            self.spans[event["pid"]][event["name"]].append(event)
        self.threads = {
            (e["pid"], e["args"]["name"]): e["tid"] for e in content["traceEvents"] if e["name"] == "thread_name"
        }

    def inside(self, rank, outer):
        """Return the names of the spans within a span, on its thread, in the order in which they begin."""
        found = [event for events in self.spans[rank].values() for event in events if event is not outer]
        return [
            event["name"]
            for event in sorted(found, key=lambda event: event["ts"])
            if event["tid"] == outer["tid"] and outer["ts"] <= event["ts"] and event["end"] <= outer["end"] + 0.002
        ]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Return a function that trains, once for each kind, and returns the trace."""
    made = {}

    def trace(kind):
        if kind not in made:
            file = tmp_path_factory.mktemp(kind) / "t.json"
            train(kind, file)
            made[kind] = Trace(file)
        return made[kind]

    return trace


@pytest.mark.parametrize("kind", ["plain", "outside", "overlap", "double"])
def test_clocks_agree(trace, kind):
    """No rank has averaged a bucket before the other rank has begun to."""
    one, other = trace(kind).spans
    assert len(one["communicate"]) == len(other["communicate"]) > 0
    for mine, theirs in zip(one["communicate"], other["communicate"], strict=True):
        assert mine["args"] == theirs["args"]
        assert mine["end"] >= theirs["ts"] - trace(kind).error
        assert theirs["end"] >= mine["ts"] - trace(kind).error


@pytest.mark.parametrize("kind", ["plain", "outside", "overlap", "double"])
def test_steps(trace, kind):
    for spans in trace(kind).spans:
        assert [event["args"]["number"] for event in spans["step"]] == list(range(5))
        assert len(spans["between steps"]) == 4
        for gap, before, after in zip(spans["between steps"], spans["step"], spans["step"][1:], strict=False):
            assert gap["ts"] == pytest.approx(before["end"], abs=0.002)
            assert gap["end"] == pytest.approx(after["ts"], abs=0.002)
        # The first update broadcasts; with double buffering the second has nothing to apply yet.
        assert len(spans["update"]) == (3 if kind == "double" else 4)
        assert len(spans["bcast_data"]) == 1


@pytest.mark.parametrize("kind", ["plain", "outside", "overlap", "double"])
def test_spans_lie_within_one_another_or_apart(trace, kind):
    """To the nanosecond: the viewers do not show overlapping spans of a thread."""
    rows = defaultdict(list)
    for rank, spans in enumerate(trace(kind).spans):
        for event in (event for events in spans.values() for event in events):
            begin, end = round(event["ts"] * 1000), round(event["end"] * 1000)
            rows[rank, event["tid"]].append((begin, -end, event["name"]))
    for row in rows.values():
        open_until = []
        for begin, negative_end, name in sorted(row):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or -negative_end <= open_until[-1], name
            open_until.append(-negative_end)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_after_the_other(trace, rank):
    found = trace("plain")
    assert found.inside(rank, found.spans[rank]["step"][0]) == ["forward", "backward", "bcast_data"]
    for step in found.spans[rank]["step"][1:]:
        expected = ["forward", "backward", "multi_node_mean_grad", "agree", "communicate", "update"]
        assert found.inside(rank, step) == expected
    sizes = {event["args"]["bytes"] for event in found.spans[rank]["communicate"]}
    assert sizes == {4 * (20 * 300 + 300 + 300 * 300 + 300 + 300 * 10 + 10)}
    assert (rank, "communication thread") not in found.threads


@pytest.mark.parametrize("rank", [0, 1])
def test_backward_outside_of_the_update(trace, rank):
    found = trace("outside")
    assert not found.spans[rank]["forward"]
    assert found.inside(rank, found.spans[rank]["step"][0]) == ["bcast_data"]
    assert found.inside(rank, found.spans[rank]["step"][1])[0] == "multi_node_mean_grad"


@pytest.mark.parametrize("rank", [0, 1])
def test_overlap(trace, rank):
    found = trace("overlap")
    spans = found.spans[rank]
    assert {event["tid"] for event in spans["communicate"]} == {found.threads[rank, "communication thread"]}
    for step, backward in list(zip(spans["step"], spans["backward"], strict=True))[2:]:  # the order is known
        inside = [event for event in spans["pack"] if backward["ts"] <= event["ts"] <= backward["end"]]
        assert inside, "no bucket was packed during the backward pass"
        assert inside[0]["args"]["bucket"] == 0
        waits = [event for event in spans["wait"] if step["ts"] <= event["ts"] <= step["end"]]
        communicate = [event for event in spans["communicate"] if step["ts"] <= event["ts"] <= step["end"]]
        assert [event["args"]["bucket"] for event in waits] == [event["args"]["bucket"] for event in communicate]
        for waited, done in zip(waits, communicate, strict=True):
            assert waited["ts"] >= backward["end"]
            assert waited["end"] >= done["ts"]
        assert found.inside(rank, step)[-1] == "update"


@pytest.mark.parametrize("rank", [0, 1])
def test_double_buffering(trace, rank):
    found = trace("double")
    spans = found.spans[rank]
    assert {event["tid"] for event in spans["communicate"]} == {found.threads[rank, "communication thread"]}
    # A step waits for the gradients that the previous step has packed; nothing waits for those of the last step.
    assert [len(spans[name]) for name in ("pack", "communicate", "wait", "unpack")] == [4, 4, 3, 3]
    kinds = ("pack", "communicate", "wait", "unpack")
    for packed, done, waited, unpacked in zip(*(spans[kind] for kind in kinds), strict=False):
        assert packed["end"] <= done["ts"] + 0.002
        assert done["end"] <= unpacked["ts"] + 0.002
        assert waited["end"] <= unpacked["ts"] + 0.002
    for later_pack, waited in zip(spans["pack"][1:], spans["wait"], strict=True):
        assert later_pack["end"] <= waited["ts"] + 0.002


@pytest.mark.parametrize("kind", ["plain", "overlap", "double"])
def test_without_a_timeline_nothing_of_it_is_loaded(kind):
    train(kind, "")
