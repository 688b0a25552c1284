"""The arguments of ``python -m mn_comm bench``."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mn_comm.building_blocks import STRATEGIES
from mn_tools.bench.models import MODELS

ITEM_BYTES = 4  # of a float32

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_CHARTS = (".png", ".pdf", ".svg")
_LARGEST = 4 << 30  # some MPI libraries cannot handle more elements than this at once


@dataclass(frozen=True)
class Options:
    """The settings of a measurement, and the files for its results.

    Attributes:
        sizes: The sizes of one rank's gradients in bytes, ascending.
        strategies: Names of communicators.
        rounds: The maximum number of rounds.
        arrays: The number of arrays into which the bytes are divided.
        device: Whether to use CuPy arrays.
        json: A file for the figures; ``-`` for the standard output, ``None`` for none.
        plot: A file for the chart; ``None`` for none.
        ranks: How many ranks to start; ``None`` if they have been started already.
        model: The model whose training is to be recommended; ``None`` to time averages of ``sizes``.
        compute: The seconds of its forward and backward pass, or ``package.module:function``.
        seconds: How long the measurement for a recommendation may take.
    """

    sizes: tuple[int, ...]
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    rounds: int = 20
    arrays: int = 1
    device: bool = False
    json: str | None = None
    plot: str | None = None
    ranks: int | None = None
    model: str | None = None
    compute: float | str = 0.0
    seconds: float = 45.0


def parse(argv: Sequence[str]) -> Options:
    """Read the arguments.

    Raises:
        SystemExit: They are wrong, with one message on stderr and the code 2; or help was requested, with the code 0.
    """
    parser = _parser()
    given = vars(parser.parse_args(argv))
    _check_model(parser, given)
    largest = given.pop("max_bytes", 64 << 20)
    options = Options(**{"sizes": _default_sizes(largest), **given})
    if options.arrays * ITEM_BYTES > options.sizes[0]:
        smallest = f"{options.sizes[0]} bytes"
        parser.error(f"expected sizes of at least one element for each of {options.arrays} arrays, got {smallest}")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs the package matplotlib: pip install 'mn-tools[plot]', or pip install matplotlib")
    if options.plot is not None and not options.plot.endswith(_CHARTS):
        parser.error(f"expected a file for --plot that ends in {', '.join(_CHARTS)}; got {options.plot}")
    for file in (options.json, options.plot):
        if file not in (None, "-") and not _can_write(file):
            parser.error(f"cannot write to {file}: expected a file, in a folder that exists, that may be written")
    return options


def _can_write(file: str) -> bool:
    where = file if os.path.exists(file) else os.path.dirname(file) or "."
    return not os.path.isdir(file) and os.access(where, os.W_OK)


def to_bytes(text: str) -> int:
    """Return a number of bytes, written as ``512``, ``4K``, ``64M``, ``64MiB`` or ``1G``.

    Raises:
        argparse.ArgumentTypeError: It is not a multiple of 4, from 4 to 4G.
    """
    match = re.fullmatch(r"(\d+)\s*(?:([KMGkmg])(?:iB)?)?", text.strip())
    nbytes = int(match[1]) * _UNITS[match[2].upper() if match[2] else ""] if match else 0
    if not 0 < nbytes <= _LARGEST or nbytes % ITEM_BYTES:
        raise argparse.ArgumentTypeError(
            f"expected bytes, a multiple of {ITEM_BYTES} up to 4G, such as 512, 4K or 64M; got {text!r}"
        )
    return nbytes


def to_seconds(text: str) -> float:
    """Return a time above 0, written as ``180ms``, ``0.18s`` or ``0.18``.

    Raises:
        argparse.ArgumentTypeError: It is not such a time.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(us|µs|ms|s|)", text.strip())
    seconds = float(match[1]) * _TIMES[match[2]] if match else 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"expected a time such as 180ms or 0.18s, got {text!r}")
    return seconds


def _compute(text: str) -> float | str:
    return text if ":" in text else to_seconds(text)


def _check_model(parser: argparse.ArgumentParser, given: Mapping[str, Any]) -> None:
    """End with a message if an option needs another one, or does not go with it."""
    if "model" not in given:
        for option in sorted(given.keys() & {"compute", "seconds"}):
            parser.error(f"--{option} needs --model, the model to recommend something for")
        return
    if "compute" not in given:
        parser.error("--model needs --compute, the time of a forward and a backward pass, such as --compute 180ms")
    if isinstance(given["compute"], str) and ":" not in given["model"]:
        parser.error(f"--compute {given['compute']} is called with the model, so --model has to be a function, too")
    for option in sorted(given.keys() & {"sizes", "max_bytes", "arrays", "rounds", "device"}):
        parser.error(f"--{option.replace('_', '-')} does not go with --model, which is measured in host memory")


def _default_sizes(largest: int) -> tuple[int, ...]:
    powers = (8**exponent for exponent in itertools.count(1))
    return (*itertools.takewhile(lambda size: size < largest, powers), largest)


def _strategies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in STRATEGIES:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(STRATEGIES)}; got {name!r}")
    return names


def _at_least(least: int) -> argparse._ActionType:
    def number(text: str) -> int:
        value = int(text) if text.isdecimal() else least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text!r}")
        return value

    return number


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({to_bytes(part) for part in text.split(",")}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mn_comm bench",
        argument_default=argparse.SUPPRESS,  # so that it is known which options were given
        allow_abbrev=False,
        description="Bandwidth and latency of each communicator, compared with MPI_Allreduce, on your machines. "
        "Start it as `mpiexec -n N python -m mn_comm bench`, or alone with --ranks N.",
    )
    parser.add_argument("--model", help=f"recommend how to train {', '.join(MODELS)}, MODULE:FUNCTION, or a FILE")
    parser.add_argument("--compute", type=_compute, help="its forward and backward pass: 180ms, or MODULE:FUNCTION")
    parser.add_argument("--seconds", type=to_seconds, help="how long that may take (45s)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--sizes", type=_sizes, help="bytes of gradients, such as 8,4K,64M")
    sizes.add_argument("--max-bytes", type=to_bytes, help="the largest of the default sizes (64M)")
    parser.add_argument("--strategies", type=_strategies, help=f"some of {','.join(STRATEGIES)} (all)")
    parser.add_argument("--rounds", type=_at_least(1), help="how many rounds at most (20)")
    parser.add_argument("--arrays", type=_at_least(1), help="into how many arrays the bytes are divided (1)")
    parser.add_argument("--device", action="store_true", help="average CuPy arrays")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the results to a file, or else print them instead of the table",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the results; needs matplotlib")
    parser.add_argument("--ranks", type=_at_least(2), metavar="N", help="start mpiexec -n N")
    return parser
