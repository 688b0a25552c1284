"""The measurement behind a recommendation: the parts of a step, then whole steps of the leading choices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

from mpi4py import MPI

from mn_comm import Communicator, raise_on_all
from mn_comm.building_blocks import STRATEGIES, GradientReducer
from mn_tools.bench.choices import SENDS, Choice, Estimate, Parts, expected, finalists, menu
from mn_tools.bench.contestants import Entrants
from mn_tools.bench.machines import Machines, look
from mn_tools.bench.measure import Turn, take_turns
from mn_tools.bench.models import Arrays, explain, function_at, shapes_of, thin
from mn_tools.bench.options import Options
from mn_tools.bench.rehearsal import BUCKET_BYTES, Replica, Work, local_turn, turn_of

_PROBE_BYTES, _PROBES = 2 << 20, 5
# About how many steps and averages fit into the time limit: more are measured if they are short.
_STEPS = 60
_FINALISTS = 4
_ROUNDS, _FINAL_ROUNDS = 3, 15
# Which contestants are still measured in the second half.
_CLOSE = 1.3
_COMPUTE_SECONDS = 2.5


@dataclass
class Advice:
    """What was measured, and what is expected.

    Attributes:
        machines: The environment.
        arrays: The model.
        compute: The seconds of a forward and a backward pass.
        measured_share: Which part of the model and of the computation was measured, because a whole step takes long.
        order: The communicators, in the order of preference.
        estimates: The seconds of a step with each choice.
        refusals: Why some communicators cannot run here, by name.
        notes: Further remarks.
        seconds: How long the measurement took.
    """

    machines: Machines
    arrays: Arrays
    compute: float
    measured_share: float
    order: tuple[str, ...]
    estimates: list[Estimate]
    refusals: dict[str, str]
    notes: list[str]
    seconds: float


def advise(world: MPI.Intracomm, options: Options, work: Work | None = None) -> Advice:
    """Measure, and estimate the time of a step with each choice; collective.

    Args:
        world: The ranks.
        options: The model, its computation, the communicators and the time limit.
        work: What computes; by default, a new one.

    Raises:
        RuntimeError: The model or its computation cannot be used (on every rank).
        ValueError: The model is not the same on every rank (on every rank).
    """
    begin = time.perf_counter()
    machines = look(world)
    entrants = Entrants(world, _candidates(machines, options.strategies))
    comms = entrants.communicators
    if not comms:
        refused = "".join(f"; {name}: {reason}" for name, reason in entrants.refusals.items())
        raise RuntimeError(f"no communicator to recommend: got {','.join(options.strategies)}{refused}")
    first = next(iter(comms.values()))
    arrays, model = shapes_of(first, options.model or "")
    work = work or Work(world)
    compute = _compute_seconds(world, first, options.compute, model)
    sample = thin(arrays, _share(world, first, arrays, compute, options.seconds, work))
    replica = Replica(sample, work, compute * sample.share)
    # Others would be compressed in the same way, among more ranks; and naive refuses it.
    compressing = [name for name in comms if name in ("hierarchical", "two_dimensional")]
    compressing = compressing or [name for name in comms if name != "naive"]
    trial = _Trial(world, comms, replica)
    parts = trial.parts(compressing, begin + options.seconds / 2)
    estimates = trial.rehearse(menu(list(comms), compressing), parts, begin + options.seconds)
    entrants.close()
    return Advice(
        machines=machines,
        arrays=arrays,
        compute=compute,
        measured_share=sample.share,
        order=tuple(comms),
        estimates=estimates,
        refusals=entrants.refusals,
        notes=entrants.notes,
        seconds=time.perf_counter() - begin,
    )


def distinct(machines: Machines, names: Sequence[str]) -> list[str]:
    """Return the communicators among some that average gradients in host memory in different ways.

    Args:
        machines: Where the ranks run.
        names: The names of communicators.
    """
    same = {"dummy", "pure_nccl", "non_cuda_aware", "single_node"}  # no mean, no host memory, and other names
    if len(machines.nodes) == 1 or all(node.ranks == 1 for node in machines.nodes):
        same.add("two_dimensional")
    if all(node.ranks == 1 for node in machines.nodes):
        same.add("flat")
    return [name for name in names if name not in same]


def _candidates(machines: Machines, names: Sequence[str]) -> list[str]:
    if tuple(names) == tuple(STRATEGIES):
        return distinct(machines, names)
    return [name for name in names if name != "dummy"]


def _compute_seconds(world: MPI.Intracomm, comm: Communicator, compute: float | str, model: Any) -> float:
    """Return the seconds of a forward and a backward pass, which all ranks run at the same time; collective."""
    if not isinstance(compute, str):
        return compute
    seconds: list[float] = []

    def call(times: int) -> None:
        with raise_on_all(comm), explain(f"--compute {compute}"):
            function = function_at(compute)
            for _ in range(times):
                begin = time.perf_counter()
                function(model)
                seconds.append(time.perf_counter() - begin)

    call(2)
    # As often on every rank: the function may communicate.
    times: int = world.bcast(max(3, min(50, int(_COMPUTE_SECONDS / max(seconds[-1], 1e-9)))))
    seconds.clear()
    call(times)
    return float(mean(world.allgather(median(seconds))))


def _share(world: MPI.Intracomm, comm: Communicator, arrays: Arrays, compute: float, limit: float, work: Work) -> float:
    """Return which part of a model to measure, so that the measurement ends in time; collective."""
    thinned = thin(arrays, _PROBE_BYTES / arrays.nbytes)
    probe = Replica(thinned, work, 0.0)
    probe.backward()
    seconds = take_turns(world, {"": Turn(lambda: comm.multi_node_mean_grad(probe))}, _PROBES, math.inf)[""]
    step = compute + min(seconds) / thinned.share
    return max(min(1.0, limit / (_STEPS * step)), min(1.0, _PROBE_BYTES / 2 / arrays.nbytes))


class _Trial(NamedTuple):
    """What is measured: the communicators of some ranks, and a copy of a model."""

    world: MPI.Intracomm
    comms: Mapping[str, Communicator]
    replica: Replica

    def parts(self, compressing: Sequence[str], end: float) -> Parts:
        """Measure the parts of a step; collective.

        Args:
            compressing: The names of communicators with which averages in the background and compressions are measured.
            end: When to stop, on rank 0's ``time.perf_counter()``.
        """
        replica = self.replica

        def meet() -> None:
            replica.update()
            replica.update()

        replica.backward()
        turns = {"forward": Turn(replica.forward), "backward": Turn(replica.backward), "update": Turn(replica.update)}
        turns["meeting"] = Turn(meet)
        for name, comm in self.comms.items():
            turns[f"{name} average"] = Turn(partial(comm.multi_node_mean_grad, replica))
        fastest = {name: min(each) for name, each in take_turns(self.world, turns, _ROUNDS, end).items()}
        averages = {(name, ""): fastest[f"{name} average"] for name in self.comms}
        background: dict[tuple[str, str], float] = {}
        hidden: dict[tuple[str, str], float] = {}
        for name in compressing:
            for send in ("", *SENDS):
                reducer = self.comms[name].gradient_reducer(background=True, compression=SENDS.get(send))
                alone, together, computing = self._overlap(reducer, end)
                background[name, send] = alone
                hidden[name, send] = min(1.0, max(0.0, (computing + alone - together) / min(computing, alone)))
                if send:
                    averages[name, send] = alone
        return Parts(
            forward=fastest["forward"],
            backward=fastest["backward"],
            update=fastest["update"],
            alone=fastest["forward"] + fastest["backward"] + fastest["update"],
            meeting=fastest["meeting"],
            averages=averages,
            background=background,
            hidden=hidden,
            last=replica.last,
        )

    def _overlap(self, reducer: GradientReducer, end: float) -> tuple[float, float, float]:
        """Return the seconds of an average alone, of one that runs during a computation, and of the computation."""

        def average(meanwhile: Callable[[], object]) -> None:
            reduction = reducer.start(self.replica)
            reduction.ready_all()
            meanwhile()
            reduction.wait()

        turns = {
            "alone": Turn(lambda: average(lambda: None)),
            "together": Turn(lambda: average(self.replica.forward)),
            "computing": Turn(self.replica.forward),
        }
        seconds = take_turns(self.world, turns, _ROUNDS - 1, end)
        return min(seconds["alone"]), min(seconds["together"]), min(seconds["computing"])

    def rehearse(self, choices: Sequence[Choice], parts: Parts, end: float) -> list[Estimate]:
        """Take whole steps with the leading choices, and with local steps; collective.

        Args:
            choices: What can be chosen.
            parts: The measured parts of a step.
            end: When to stop, on rank 0's ``time.perf_counter()``.

        Returns:
            An estimate of each choice, for the whole model.
        """
        world, comms, replica = self
        estimates = [Estimate(choice, expected(choice, parts)) for choice in choices]
        in_every_step = [each for each in estimates if not each.choice.steps]
        leading = finalists(in_every_step, next(iter(comms)), _FINALISTS)  # the same on every rank, as all times are
        bucket_bytes = max(1, int(BUCKET_BYTES * replica.share))
        turns = {_key(choice): turn_of(choice, comms[choice.strategy], replica, bucket_bytes) for choice in leading}
        local = next((each.choice for each in estimates if each.choice.steps), None)
        clock: list[float] = []
        if local is not None:
            turns["local steps"] = local_turn(comms[local.strategy], replica, clock)
        first = take_turns(world, turns, _FINAL_ROUNDS, (time.perf_counter() + end) / 2)
        ahead = _ahead(first, {_key(each) for each in leading if each.is_exact})
        second = take_turns(world, {name: turns[name] for name in ahead}, _FINAL_ROUNDS, end)
        seconds = {name: median([*each, *second.get(name, [])]) for name, each in first.items()}
        if local is not None:
            step, meeting = _agreed(world, clock[0::2][1:], mean), _agreed(world, clock[1::2][1:], max)
            parts = replace(parts, alone=step, meeting=0.0, averages={(local.strategy, ""): meeting})
            seconds |= {_key(each.choice): expected(each.choice, parts) for each in estimates if each.choice.steps}
        whole = {name: each / replica.share for name, each in seconds.items()}
        return [
            Estimate(each.choice, each.expected / replica.share, whole.get(_key(each.choice))) for each in estimates
        ]


def _ahead(seconds: Mapping[str, Sequence[float]], exact: Collection[str]) -> list[str]:
    """Return the contestants that may still win: among those that are exact, or among all."""
    found = {name: median(each) for name, each in seconds.items()}
    fastest = min(found.values())
    fastest_exact = min(found[name] for name in exact)
    return [name for name, each in found.items() if each <= _CLOSE * (fastest_exact if name in exact else fastest)]


def _agreed(world: MPI.Intracomm, seconds: Sequence[float], combine: Callable[[list[float]], float]) -> float:
    return float(combine(world.allgather(median(seconds))))


def _key(choice: Choice) -> str:
    return f"{choice.strategy}, {choice}"
