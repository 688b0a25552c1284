"""Average gradients after, during and one step after the backward pass, and record a timeline of each.

    mpiexec -n 2 python overlap.py
    python overlap.py --draw 1

On one machine, averaging takes next to no time. So the script pretends to have a network of 2 Gbit/s.
"""

import json
import os
import time

import chainer
import chainermn
from chainermn.optimizers import AfterBackward, DuringBackward, MultiNodeOptimizer, OneStepLate
from setting import batches, get_device, get_digits, make_model, parse_options

import mn_comm

WAYS = {"after": AfterBackward, "during": DuringBackward, "one step late": OneStepLate}
COLOURS = {"forward": "#56b4e9", "backward": "#0072b2", "network": "#d55e00", "wait": "#bbbbbb", "update": "#009e73"}


def train(comm, when, args):
    """Return the milliseconds of a step."""
    device = get_device(args.device, comm)
    model = make_model(*[1000] * 5, device=device)
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.01), comm, when).setup(model)
    began = 0.0
    for step, batch in enumerate(batches(comm, get_digits()[0], 100, device, args.steps + 3)):
        began = time.perf_counter() if step == 3 else began
        optimizer.update(model, *batch)
    return 1000 * (time.perf_counter() - began) / args.steps


def measure(args):
    os.environ["CHAINERMN_TIMELINE"] = f"{args.out}/overlap.json"  # as if it had been set in the shell
    comm = chainermn.create_communicator("flat")

    def slow(bucket):
        def wait(mean):
            with mn_comm.span("network"):
                time.sleep(8 * bucket.flat.nbytes / (args.gbit * 1e9))
            return mean

        return bucket.average().then(wait)

    for name, when in WAYS.items():
        milliseconds = train(comm, when(send=slow), args)
        if comm.rank == 0:
            print(f"{name:14} {milliseconds:.0f} ms a step")


def draw(args):
    """Draw the last two steps of each way on rank 0."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with open(f"{args.out}/overlap.json") as file:
        spans = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    steps = sorted((span for span in spans if span["name"] == "step"), key=lambda span: span["ts"])
    figure = Figure(figsize=(9, 4), layout="constrained")
    rows = figure.subplots(len(WAYS), 1, sharex=True, subplot_kw={"yticks": []})
    for i, (name, axes) in enumerate(zip(WAYS, rows, strict=True)):
        last = steps[(i + 1) * len(steps) // len(WAYS) - 2 :][:2]
        begin, end = last[0]["ts"], last[1]["ts"] + last[1]["dur"]
        for span in (span for span in spans if span["name"] in COLOURS and begin <= span["ts"] < end):
            row, left = int(span["tid"] == last[0]["tid"]), (span["ts"] - begin) / 1e3
            axes.barh(row, span["dur"] / 1e3, left=left, color=COLOURS[span["name"]])
        axes.set_title(name, loc="left")
    rows[-1].set_xlabel("milliseconds; upper row: the main thread, lower row: the one that communicates")
    figure.legend([Patch(color=each) for each in COLOURS.values()], COLOURS, loc="outside right")
    figure.savefig(f"{args.out}/overlap.png", dpi=100)


if __name__ == "__main__":
    arguments = parse_options(__doc__, steps=20, gbit=2.0, draw=0)
    draw(arguments) if arguments.draw else measure(arguments)
