"""How long each part of a recovery takes, measured while no rank dies.

    mpiexec --with-ft ulfm -n 2 python benchmarks/recovery_parts.py [--json figures.jsonl]
    python benchmarks/recovery_parts.py --alone [--json figures.jsonl]

The first command measures what MPI does in a recovery, right after a barrier. The second one measures, in one process,
what each rank and the supervisor do for all ranks of a job, in jobs of up to 10,000 ranks, which do not exist.
``benchmarks/recovery_model.py`` reads the results of both.
"""

from __future__ import annotations

import argparse
import json
import pickle
import selectors
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mn_comm import Change

SIZES = (100, 1_000, 10_000)
RANKS_PER_NODE = 8
BATCH = 32


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", action="store_true", help="measure the parts that need no other ranks")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", default="", help="a file to add the figures to, as lines of JSON")
    args = parser.parse_args()
    for ranks, seconds in alone(args.rounds) if args.alone else together(args.rounds):
        for name, each in seconds.items():
            print(f"{ranks:6} ranks  {name:44}{1e6 * each:14.1f} us", flush=True)
        if args.json:
            with Path(args.json).open("a") as file:
                figures = {"benchmark": "recovery_parts", "alone": args.alone, "ranks": ranks, "seconds": seconds}
                file.write(json.dumps(figures) + "\n")


def together(rounds: int) -> list[tuple[int, dict[str, float]]]:
    """Return the median seconds of what MPI does; an empty list on all ranks but 0."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    base: Any = world.Dup()
    made: list[MPI.Comm] = []
    parts: dict[str, Callable[[], object]] = {
        "agree": lambda: base.Agree(1),
        "shrink": lambda: made.append(base.Shrink()),
        "dup": lambda: made.append(base.Dup()),
        "split": lambda: made.append(base.Split(0, base.rank)),
        "names": lambda: base.allgather(MPI.Get_processor_name()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, run in parts.items():
            world.Barrier()
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
            while made:
                made.pop().Free()
    return [(world.size, {name: statistics.median(each) for name, each in seconds.items()})] if not world.rank else []


def alone(rounds: int) -> list[tuple[int, dict[str, float]]]:
    """Return the median seconds of what is done for all ranks of a job, for some numbers of ranks."""
    return [(ranks, {name: median_of(run, rounds) for name, run in parts_of(ranks).items()}) for ranks in SIZES]


def median_of(run: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of a call, by this process's clock, which stops while others use the core."""
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def parts_of(ranks: int) -> dict[str, Callable[[], object]]:
    """Return what a rank, or the supervisor, does for all ranks of a job, by name."""
    from mn_comm.ranks.topology import place

    names = [f"node{rank // RANKS_PER_NODE:05}" for rank in range(ranks)]
    pickled = [pickle.dumps(name) for name in names]
    alive = tuple(range(1, ranks))
    iterator = make_iterator(ranks)
    return {
        "read the names of their nodes": lambda: [pickle.loads(each) for each in pickled],
        "find this rank's place among them": lambda: place(names, ranks - 1),
        "say who is lost": lambda: Change(
            1, tuple(sorted(set(range(ranks)) - set(alive))), tuple(alive[i] for i in range(ranks - 1)), 0, 0.0
        ),
        "deal their samples": lambda: deal(iterator),
        "deal those of a lost one again": lambda: lose_one(iterator, ranks),
        "tell each keeper of a beat, and hear one": make_listener(ranks // RANKS_PER_NODE),
    }


class _Job:
    """Stands in for the communicator of an iterator: a job of any size, whose other ranks do not exist."""

    is_elastic = True

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set."""
        return flag

    def allgather_obj(self, obj: object) -> list[object]:
        """Return an object."""
        return [obj]

    def transact(self, function: Callable[[], Any]) -> Any:
        """Call a function."""
        return function()

    def on_change(self, callback: object) -> None:
        """Ignore a function to call after a loss: there are no losses."""

    on_commit = on_change


def make_iterator(ranks: int) -> Any:
    """Return the iterator of rank 0, in a job with some number of ranks."""
    import mn_data

    return mn_data.ElasticIterator(range(1_000_000), BATCH, _Job(ranks), shuffle=False)


def deal(iterator: Any) -> None:
    """Let an iterator deal the samples of a step."""
    next(iterator)
    iterator.commit()


def lose_one(iterator: Any, ranks: int) -> None:
    """Let an iterator lose a rank in the middle of a step, and deal again."""
    next(iterator)
    iterator.take_over(Change(1, (ranks - 1,), tuple(range(ranks - 1)), 0, 0.0))
    iterator.commit()


def make_listener(nodes: int) -> Callable[[], object]:
    """Return a function that does what the supervisor does 2.5 times a second for the keepers of all nodes."""
    pairs = [socket.socketpair() for _ in range(max(1, nodes))]
    selector = selectors.DefaultSelector()
    for here, _ in pairs:
        selector.register(here, selectors.EVENT_READ)
    beat = b'{"op": "beat"}\n'

    def listen() -> None:
        for here, there in pairs:
            here.sendall(beat)
            there.sendall(beat)
        for key, _ in selector.select(0):
            received: socket.socket = key.fileobj  # type: ignore[assignment]
            json.loads(received.recv(1 << 16))
        for _, there in pairs:
            there.recv(1 << 16)

    return listen


if __name__ == "__main__":
    main()
