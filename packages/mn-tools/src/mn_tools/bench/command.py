"""The command: read the arguments, measure, report."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm import create_communicator
from mn_tools.bench import measure
from mn_tools.bench.advice_report import advice_to_json, advice_to_lines
from mn_tools.bench.advise import advise
from mn_tools.bench.contestants import Entrants, Gradients, use_device
from mn_tools.bench.machines import look
from mn_tools.bench.options import Options, parse
from mn_tools.bench.plot import draw, draw_advice
from mn_tools.bench.report import GPU, HOST, Report, rows_of, to_json, to_lines

_SECONDS_PER_SIZE = 10.0
_LEAST_ROUNDS = 3
_LATENCY_ROUNDS = 20
_LATENCY_SECONDS = 5.0  # for all of them; it is reached if each operation waits for a core
_LATENCY_TOGETHER = 20
_USAGE = 2

_HOW = """\
there is only one process, so there is nothing to measure: start several with
    mpiexec -n 4 python -m mn_comm bench
or let this command start them, with
    python -m mn_comm bench --ranks 4
"""


def main(argv: list[str]) -> int:
    """Measure communicators, or recommend how to train a model; collective over all processes of ``mpiexec``.

    Args:
        argv: The arguments, without the program's name.

    Returns:
        The exit status, the same on every rank: 0, or 1 if a result was wrong, or 2 if the request could not be carried
        out.
    """
    world = MPI.COMM_WORLD
    options = _agree_on_options(world, argv)
    if isinstance(options, int):
        return options
    if world.size == 1:
        return _start(options.ranks, argv)
    return _time_averages(world, options) if options.model is None else _advise(world, options)


def _agree_on_options(world: MPI.Intracomm, argv: list[str]) -> Options | int:
    """Let rank 0 read the arguments, so that there is only one message; return an exit status if they are wrong."""
    found: Options | int = 0
    if world.rank == 0:
        try:
            found = parse(argv)
        except SystemExit as end:
            found = end.code if isinstance(end.code, int) else _USAGE
        if isinstance(found, Options) and found.ranks is not None and world.size > 1:
            sys.stderr.write("mn_comm bench: --ranks starts mpiexec, but this process was already started by mpiexec\n")
            found = _USAGE
        sys.stderr.flush()
    agreed: Options | int = world.bcast(found)
    return agreed


def _start(ranks: int | None, argv: list[str]) -> int:
    """Start several processes, or print how to do so."""
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
    if ranks is None:
        sys.stderr.write(f"mn_comm bench: {_HOW}")
        return _USAGE
    if mpiexec is None:
        sys.stderr.write("mn_comm bench: --ranks needs mpiexec, which is neither beside python nor on PATH\n")
        return _USAGE
    command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "mn_comm", "bench", *_without_ranks(argv)]
    # The environment when Python started: MPI may have added variables that child processes must not inherit.
    return subprocess.run(command, env=dict(os.environ), check=False).returncode


def _without_ranks(argv: list[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ranks")
    return parser.parse_known_args(argv)[1]


def _refuse(world: MPI.Intracomm, error: Exception) -> int:
    """Say why the request cannot be carried out, an error that every rank has; return the exit status."""
    if world.rank == 0:
        sys.stderr.write(f"mn_comm bench: {error}\n")
    return _USAGE


def _time_averages(world: MPI.Intracomm, options: Options) -> int:
    if options.device:
        try:
            use_device(world, create_communicator("naive", world).intra_rank)
        except RuntimeError as error:
            return _refuse(world, error)
    report = Report(look(world), GPU if options.device else HOST, options.arrays)
    report.latencies = _latencies(world)
    entrants = Entrants(world, options.strategies)
    for nbytes in options.sizes:
        gradients = Gradients(nbytes, options.arrays, options.device)
        turns = entrants.turns(gradients, nbytes)
        end, together = time.perf_counter() + _SECONDS_PER_SIZE, measure.repeats(nbytes)
        seconds = measure.take_turns(world, turns, options.rounds, end, least=_LEAST_ROUNDS, together=together)
        report.rows += rows_of(nbytes, world.size, seconds)
    report.refusals, report.wrong, report.notes = entrants.refusals, entrants.wrong, entrants.notes
    entrants.close()
    if world.rank == 0:
        _publish(options, to_json(report), to_lines(report), partial(draw, report))
    return 1 if report.wrong else 0


def _latencies(world: MPI.Intracomm) -> dict[str, float]:
    """Return the times of the shortest operations."""
    last = world.size - 1
    comm = create_communicator("naive", world)
    end = time.perf_counter() + _LATENCY_SECONDS
    buffer: Any = np.zeros(8, np.uint8)
    thing = {"iteration": 1, "loss": 0.5}
    bytes_ = partial(world.Send, buffer), partial(world.Recv, buffer)
    object_ = partial(comm.send_obj, thing), comm.recv_obj

    def seconds(run: Callable[[], object]) -> float:
        turns, together = {"": measure.Turn(run)}, _LATENCY_TOGETHER
        return median(measure.take_turns(world, turns, _LATENCY_ROUNDS, end, together=together)[""])

    return {
        "barrier": seconds(world.Barrier),
        f"8 bytes between ranks 0 and {last}, one way": seconds(partial(_ping_pong, world, last, *bytes_)) / 2,
        f"a small object between ranks 0 and {last}": seconds(partial(_ping_pong, world, last, *object_)) / 2,
    }


def _ping_pong(
    world: MPI.Intracomm, last: int, send: Callable[[int], object], receive: Callable[[int], object]
) -> None:
    """Send a message there and back, between rank 0 and the last rank."""
    if world.rank == 0:
        send(last)
        receive(last)
    elif world.rank == last:
        receive(0)
        send(0)


def _advise(world: MPI.Intracomm, options: Options) -> int:
    try:
        advice = advise(world, options)
    except (RuntimeError, ValueError) as error:
        return _refuse(world, error)
    if world.rank == 0:
        _publish(options, advice_to_json(advice), advice_to_lines(advice), partial(draw_advice, advice))
    return 0


def _publish(options: Options, figures: dict[str, Any], lines: Iterable[str], draw_to: Callable[[str], object]) -> None:
    text = json.dumps(figures, indent=1, ensure_ascii=False) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    if options.json not in (None, "-"):
        Path(options.json).write_text(text, encoding="utf-8")
    sys.stdout.flush()
    if options.plot is not None:
        draw_to(options.plot)
