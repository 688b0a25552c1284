"""Draw the pictures of the documentation: ``python docs/pictures/draw.py`` writes them beside this file."""

import json
from pathlib import Path

from canvas import Canvas

__all__ = ["PICTURES"]

COLOURS = ["blue", "orange", "green", "purple"]
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "two-cores.jsonl"
# The names in the benchmark, and the names in the chart.
CONTESTANTS = {
    "memory copy": ("one memory copy, for comparison", "plain"),
    "ours, hierarchical": ("this package, hierarchical (the default)", "blue"),
    "bundled naive": ("ChainerMN 7, naive", "orange tint"),
    "MPI_Allreduce of each array": ("MPI_Allreduce, array by array", "orange tint"),
    "MPI_Allreduce of one buffer": ("MPI_Allreduce, packed into one buffer", "orange tint"),
    "Gloo in 25 MB buckets": ("PyTorch's Gloo, buckets of 25 MB", "orange tint"),
}


def overview() -> Canvas:
    """Data-parallel training: every process has the model, and a part of the data."""
    title = "Each process computes gradients from its part of the data; their average updates every copy of the model."
    picture = Canvas("overview", title, 720, 372)
    picture.labelled(30, 12, 660, 34, "the data set", "panel", "bold")
    for rank, colour in enumerate(COLOURS):
        x = 30 + 168 * rank
        middle = x + 78
        picture.arrow((middle, 46), (middle, 72))
        picture.box(x, 74, 156, 152, "panel")
        picture.text(middle, 92, f"process {rank}", "bold")
        picture.labelled(x + 14, 106, 128, 28, "its part of the data", f"{colour} tint", "small")
        picture.arrow((middle, 134), (middle, 150))
        picture.labelled(x + 14, 152, 128, 28, "its copy of the model", f"{colour} tint", "small")
        picture.arrow((middle, 180), (middle, 194))
        picture.text(middle, 206, "its gradients", "small soft")
        picture.arrow((middle - 16, 226), (middle - 16, 262))
        picture.arrow((middle + 16, 262), (middle + 16, 228))
    picture.labelled(30, 264, 660, 38, "the average of the gradients", "plain", "bold")
    picture.text(360, 326, "down: every process gives its gradients", "soft")
    picture.text(360, 348, "up: every process gets their average, and takes the same step with it", "soft")
    return picture


def step() -> Canvas:
    """When gradients are sent within a step."""
    title = "Three timelines of training steps: averaging after, during, and one step behind the backward pass."
    picture = Canvas("step", title, 720, 410)
    _plain_steps(picture, 14)
    _overlapped_steps(picture, 146)
    _double_buffered_steps(picture, 278)
    return picture


def _lanes(picture: Canvas, y: float, heading: str) -> None:
    picture.box(10, y, 700, 122, "panel")
    picture.text(24, y + 18, heading, "bold", "start")
    picture.text(24, y + 52, "computes", "soft small", "start")
    picture.text(24, y + 90, "communicates", "soft small", "start")


def _bars(picture: Canvas, y: float, bars: list[tuple[float, float, str, str]]) -> None:
    for x, width, words, colour in bars:
        picture.labelled(x, y, width, 30, words, f"{colour} tint", "small")


def _plain_steps(picture: Canvas, y: float) -> None:
    _lanes(picture, y, "as it comes: averaged after the backward pass")
    for x in (120, 406):
        _bars(picture, y + 36, [(x, 66, "forward", "blue"), (x + 68, 100, "backward", "orange")])
        _bars(picture, y + 74, [(x + 170, 62, "average", "green")])
        _bars(picture, y + 36, [(x + 234, 48, "update", "purple")])


def _overlapped_steps(picture: Canvas, y: float) -> None:
    _lanes(picture, y, "DuringBackward(): the last layers' gradients leave while the first layers' are computed")
    for x in (120, 376):
        _bars(picture, y + 36, [(x, 66, "forward", "blue"), (x + 68, 100, "backward", "orange")])
        picture.text(x + 104, y + 89, "average", "small", "end")
        _bars(picture, y + 74, [(x + 108 + 33 * part, 31, "", "green") for part in range(3)])
        _bars(picture, y + 36, [(x + 206, 48, "update", "purple")])


def _double_buffered_steps(picture: Canvas, y: float) -> None:
    _lanes(picture, y, "OneStepLate(): each step applies the average of the step before")
    for number, x in enumerate((120, 272, 478), start=1):
        _bars(picture, y + 36, [(x, 60, "forward", "blue"), (x + 62, 88, "backward", "orange")])
        if number > 1:
            _bars(picture, y + 36, [(x + 154, 50, "update", "purple")])
            picture.arrow((x + 124, y + 89), (x + 179, y + 89), (x + 179, y + 68))
        if number < 3:
            _bars(picture, y + 74, [(x + 152 + 54 * (number - 1), 122, f"average of step {number}", "green")])


def scatter() -> Canvas:
    """Ten samples for three processes, in both ways."""
    title = "scatter_dataset gives ten samples to three processes: parts of equal length, or parts that share none."
    picture = Canvas("scatter", title, 720, 330)
    _samples(picture, 210, 34, 0, 10, "plain")
    picture.text(196, 49, "at rank 0: the data set", "", "end")
    equal = [(0, 4), (3, 7), (6, 10)]
    disjoint = [(0, 4), (4, 7), (7, 10)]
    for y, heading, parts in (
        (86, "by default: equal lengths, neighbours may share a sample", equal),
        (208, "force_equal_length=False: no sample twice", disjoint),
    ):
        picture.box(10, y, 700, 112, "panel")
        picture.text(24, y + 16, heading, "bold", "start")
        for rank, (begin, end) in enumerate(parts):
            row = y + 28 + 27 * rank
            picture.text(196, row + 11, f"rank {rank}", "soft", "end")
            _samples(picture, 210, row, begin, end, f"{COLOURS[rank]} tint", 22)
    return picture


def _samples(picture: Canvas, x: float, y: float, begin: int, end: int, style: str, height: float = 30) -> None:
    for index in range(begin, end):
        picture.labelled(x + 46 * index, y, 42, height, str(index), style, "small")


def topology() -> Canvas:
    """Ranks of two hosts."""
    title = "Four processes on two hosts, and the rank, intra_rank and inter_rank of each."
    picture = Canvas("topology", title, 720, 232)
    for host in range(2):
        x = 20 + 350 * host
        picture.box(x, 14, 330, 168, "panel")
        picture.text(x + 165, 34, f"host {'AB'[host]}", "bold")
        picture.text(x + 165, 54, f"inter_rank {host} of inter_size 2", "code soft")
        for intra in range(2):
            left = x + 16 + 152 * intra
            picture.box(left, 72, 146, 94, f"{COLOURS[2 * host + intra]} tint")
            picture.text(left + 73, 92, f"rank {2 * host + intra}", "bold")
            picture.text(left + 73, 116, f"intra_rank {intra}", "code")
            picture.text(left + 73, 134, "intra_size 2", "code")
            picture.text(left + 73, 152, f"takes GPU {intra}", "small soft")
    picture.arrow((352, 120), (368, 120), is_open=True)
    picture.text(360, 208, "rank counts all processes, intra_rank those of one host, inter_rank the hosts", "soft")
    return picture


def delegate() -> Canvas:
    """A model on two ranks, and the delegate variable that connects rank 0's two halves."""
    title = (
        "Rank 0 sends to rank 1 and receives its answer; the delegate variable joins rank 0's send to its recv, "
        "so that the backward pass goes all the way."
    )
    picture = Canvas("delegate", title, 720, 306)
    _rank_lane(picture, 14, 0, "blue", 62)
    _rank_lane(picture, 160, 1, "orange", 30)
    top = [("first layer", 104, 92), ("send", 226, 60), ("recv", 450, 60), ("last layer", 540, 84), ("loss", 650, 46)]
    for words, x, width in top:
        picture.labelled(x, 84, width, 32, words, "blue tint", "code" if words in ("send", "recv") else "small")
    for x, width, words in ((254, 60, "recv"), (338, 92, "middle layer"), (454, 60, "send")):
        picture.labelled(x, 196, width, 32, words, "orange tint", "small" if "layer" in words else "code")
    for start, end in ((196, 224), (510, 538), (624, 648)):
        picture.arrow((start, 100), (end, 100))
    for start, end in ((314, 336), (430, 452)):
        picture.arrow((start, 212), (end, 212))
    picture.arrow((264, 116), (280, 194))
    picture.arrow((484, 196), (484, 118))
    picture.text(262, 158, "values", "small soft", "end")
    picture.text(494, 158, "values", "small soft", "start")
    picture.arrow((286, 100), (448, 100), style="green dashed")
    picture.text(367, 88, "delegate variable", "small")
    picture.text(400, 42, "backward pass of rank 0: from the loss back to the first layer", "small soft")
    picture.arrow((672, 58), (150, 58), style="red")
    picture.arrow((484, 252), (264, 252), style="red")
    picture.text(384, 268, "backward pass of rank 1: from what send returned", "small soft")
    return picture


def _rank_lane(picture: Canvas, y: float, rank: int, colour: str, label: float) -> None:
    picture.box(10, y, 700, 132, "panel")
    picture.labelled(22, y + label + 10, 62, 28, f"rank {rank}", f"{colour} tint", "bold")


def pseudo_connect() -> Canvas:
    """A graph in two pieces, and their connection."""
    title = "Without pseudo_connect the backward pass from the loss does not reach send; with it, it does."
    picture = Canvas("pseudo-connect", title, 720, 356)
    _two_branches(picture, 12, "without: the backward pass never comes to send, and rank 1 gets no gradient", False)
    _two_branches(picture, 188, "with: one Variable stands for both", True)
    return picture


def _two_branches(picture: Canvas, y: float, heading: str, joined: bool) -> None:
    picture.box(10, y, 700, 158, "panel")
    picture.text(24, y + 18, heading, "bold", "start")
    low, high = y + 52, y + 112
    picture.labelled(28, y + 78, 36, 30, "x", "plain", "code")
    picture.arrow((64, y + 93), (96, low + 15))
    picture.arrow((64, y + 93), (96, high + 15))
    picture.labelled(98, low, 90, 30, "layer a", "blue tint", "small")
    picture.labelled(98, high, 90, 30, "layer b", "blue tint", "small")
    picture.arrow((188, low + 15), (216, low + 15))
    picture.labelled(218, low, 62, 30, "send", "blue tint", "code")
    picture.arrow((250, low), (250, low - 12), (330, low - 12))
    picture.text(338, low - 12, "to rank 1", "small soft", "start")
    if not joined:
        picture.arrow((188, high + 15), (566, high + 15))
        picture.labelled(568, high, 60, 30, "loss", "blue tint", "small")
        picture.arrow((280, low + 15), (330, low + 15), style="green dashed")
        picture.text(338, low + 15, "delegate variable, which nothing uses", "small", "start")
        picture.arrow((600, high - 6), (198, high - 6), style="red")
        return
    picture.arrow((280, low + 15), (366, y + 90), style="green dashed")
    picture.text(318, low + 8, "delegate variable", "small", "start")
    picture.arrow((188, high + 15), (366, y + 106))
    picture.labelled(368, y + 80, 126, 36, "pseudo_connect", "green tint", "code")
    picture.arrow((494, y + 98), (566, y + 98))
    picture.labelled(568, y + 83, 60, 30, "loss", "blue tint", "small")
    picture.arrow((566, y + 110), (496, y + 110), style="red")
    picture.arrow((366, y + 98), (282, low + 28), style="red")
    picture.arrow((366, y + 114), (190, high + 24), style="red")


def network() -> Canvas:
    """Which option to use when the network is the limit."""
    title = "A flow chart: from the cause of the wait to overlap, asynchronous, local steps, or a compression."
    choices = [
        (("Does a step wait more than a tenth", "of its time? (The timeline shows it.)"), "no", "yes"),
        (("Is the wait shorter than", "the backward pass?"), "yes", "no"),
        (("Is it now one rank that is slow,", "and now another?"), "yes", "no"),
        (("Must all ranks have equal parameters", "after every step?"), "no", "yes"),
        (("Are a quarter of the bytes", "few enough?"), "yes", "no"),
    ]
    answers = [
        ("the default", "nothing to gain"),
        ("DuringBackward()", "changes no bit"),
        ("Asynchronous()", "no rank waits for another"),
        ("LocalSGD(8)", "larger H: DiLoCo, StreamingDiLoCo"),
        ("send=Int8()", "changes training least"),
    ]
    picture = Canvas("network", title, 720, 560)
    for number, ((question, aside, down), (answer, note)) in enumerate(zip(choices, answers, strict=True)):
        y = 12 + 88 * number
        picture.box(30, y, 300, 54, "plain")
        for line, words in enumerate(question):
            picture.text(180, y + 18 + 19 * line, words)
        picture.arrow((330, y + 27), (418, y + 27))
        picture.text(372, y + 17, aside, "small soft")
        picture.box(420, y, 270, 54, "blue tint", 16)
        picture.text(555, y + 18, answer, "code")
        picture.text(555, y + 37, note, "small soft")
        picture.arrow((180, y + 54), (180, y + 86))
        picture.text(188, y + 69, down, "small soft", "start")
    kinds = (
        ("send=PowerSGD(4)", "large matrices"),
        ("OneBit()", "any layers"),
        ("TopK(0.01)", "few elements matter"),
    )
    for x, width, (answer, note) in zip((30, 266, 482), (222, 202, 208), kinds, strict=True):
        picture.box(x, 452, width, 54, "blue tint", 16)
        picture.text(x + width / 2, 470, answer, "code")
        picture.text(x + width / 2, 489, note, "small soft")
    picture.text(360, 536, "DuringBackward() goes together with each compression", "small soft")
    return picture


def averaging() -> Canvas:
    """The time of averaging the gradients of ResNet-50, compared with other ways to do it."""
    seconds = _seconds("resnet50", 2)
    title = "Milliseconds that several libraries take to average the gradients of ResNet-50 over two processes."
    picture = Canvas("averaging", title, 720, 70 + 34 * len(CONTESTANTS))
    picture.box(0, 0, 720, 70 + 34 * len(CONTESTANTS), "panel")
    picture.text(
        24, 26, "Averaging the gradients of ResNet-50 (102 MB) over 2 processes: milliseconds", "bold", "start"
    )
    scale = 310 / max(seconds[name] for name in CONTESTANTS)
    for row, (name, (words, style)) in enumerate(sorted(CONTESTANTS.items(), key=lambda item: seconds[item[0]])):
        y = 62 + 34 * row
        picture.text(300, y, words, "bold" if style == "blue" else "", "end")
        picture.box(312, y - 11, scale * seconds[name], 22, style, 3)
        picture.text(320 + scale * seconds[name], y, f"{1e3 * seconds[name]:.0f}", "bold", "start")
    return picture


def _seconds(model: str, ranks: int) -> dict[str, float]:
    """Return each contestant's time on one idle host."""
    lines = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    wanted = ("averaging", model, ranks, "", 0)
    keys = ("benchmark", "model", "ranks", "network", "busy")
    return next(line["seconds"] for line in lines if tuple(line.get(key) for key in keys) == wanted)


PICTURES = [averaging, overview, step, scatter, topology, delegate, pseudo_connect, network]


def main() -> None:
    """Write every picture."""
    for draw in PICTURES:
        (Path(__file__).parent / f"{draw.__name__}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
