"""The picture of a timeline, drawn from real traces.

    export CHAINERMN_TIMELINE
    for scheme in after overlap double; do
        CHAINERMN_TIMELINE=$scheme.json
        python tools/cluster.py --hosts 1,1 --rate 1gbit -- python docs/pictures/timeline.py train $scheme
    done
    python docs/pictures/timeline.py draw after.json overlap.json double.json docs/pictures/timeline.png

The first part needs root; ``mpiexec -n 2`` in place of ``tools/cluster.py`` gives a trace without a network.
"""

import json
import sys
from pathlib import Path

TITLES = {
    "after": "gradients averaged after the backward pass",
    "overlap": "DuringBackward(): while the backward pass goes on",
    "double": "OneStepLate(): while the next step computes",
}
# Okabe and Ito's colours, which colour-blind people can distinguish.
COLOURS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "pack": "#f0e442",
    "agree": "#cc79a7",
    "communicate": "#d55e00",
    "wait": "#bbbbbb",
    "view": "#f0e442",
    "update": "#009e73",
}
STEPS = 2  # in the picture


def train(scheme: str) -> None:
    """Train a chain of linear layers for a few steps."""
    import chainer
    import chainer.functions as F
    import chainer.links as L
    import numpy as np

    import mn_optim
    from mn_comm import create_communicator

    class Net(chainer.ChainList):
        def __init__(self) -> None:
            super().__init__(*(L.Linear(1024, 1024) for _ in range(4)))

        def forward(self, x: np.ndarray) -> chainer.Variable:
            for link in self:
                x = F.tanh(link(x))
            return F.sum(x)

    comm = create_communicator("hierarchical")
    when = {"after": mn_optim.AfterBackward, "overlap": mn_optim.DuringBackward, "double": mn_optim.OneStepLate}[scheme]
    net = Net()
    optimizer = mn_optim.MultiNodeOptimizer(chainer.optimizers.SGD(0), comm, when()).setup(net)
    x = np.ones((320, 1024), np.float32)
    for _ in range(8):
        optimizer.update(net, x)


def draw(traces: list[str], picture: str) -> None:
    """Draw the last steps of each trace, all at the same scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    parts = [last_steps(json.loads(Path(trace).read_text())) for trace in traces]
    heights = [len(rows) for rows, _, _ in parts]
    figure, panels = plt.subplots(
        len(parts),
        1,
        sharex=True,
        figsize=(12, 0.42 * sum(heights) + 0.75 * len(parts) + 0.9),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
        squeeze=False,
    )
    for axes, trace, (rows, spans, begin) in zip(panels[:, 0], traces, parts, strict=True):
        for span in spans:
            row = list(rows).index((span["pid"], span["tid"]))
            left, width = (span["ts"] - begin) / 1e3, span["dur"] / 1e3
            axes.barh(row, width, left=left, height=0.8, color=COLOURS[span["name"]], edgecolor="white", linewidth=0.4)
        for step in steps_of(spans_of(json.loads(Path(trace).read_text())), 0)[-STEPS:]:
            axes.axvline((step["ts"] - begin) / 1e3, color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(rows)), list(rows.values()), fontsize=9)
        axes.invert_yaxis()
        axes.set_title(TITLES.get(Path(trace).stem, trace), loc="left", fontsize=11)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
    panels[-1, 0].set_xlabel("milliseconds, in rank 0's time; dotted: a step of rank 0 begins")
    used = {span["name"] for _, spans, _ in parts for span in spans}
    figure.legend(
        handles=[
            Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used and name != "view"
        ],
        loc="outside upper center",
        ncols=8,
        frameon=False,
    )
    figure.savefig(picture, dpi=110)


def last_steps(trace: dict) -> tuple[dict[tuple[int, int], str], list[dict], float]:
    """Return the rows and their names, the spans in the last steps, and the beginnings of these steps."""
    names = {(e["pid"], e["tid"], e["name"]): e["args"].get("name") for e in trace["traceEvents"] if e["ph"] == "M"}
    rows = {
        (pid, tid): f"rank {pid}: {name}" for (pid, tid, kind), name in sorted(names.items()) if kind == "thread_name"
    }
    spans = spans_of(trace)
    steps = steps_of(spans, 0)[-STEPS:]
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    shown = [e for e in spans if e["name"] in COLOURS and e["ts"] + e["dur"] > begin and e["ts"] < end]
    # Spans within another one, such as a pack in a backward, are drawn on top of it.
    return rows, sorted(shown, key=lambda e: -e["dur"]), begin


def spans_of(trace: dict) -> list[dict]:
    """Return the spans of a trace."""
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def steps_of(spans: list[dict], rank: int) -> list[dict]:
    """Return the steps of a rank, in order."""
    return sorted((e for e in spans if e["name"] == "step" and e["pid"] == rank), key=lambda e: e["ts"])


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2])
    else:
        draw(sys.argv[2:-1], sys.argv[-1])
