"""A recommendation as text with bars, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mn_tools.bench.advise import Advice
from mn_tools.bench.choices import Choice, Estimate, best
from mn_tools.bench.measure import AS_FAST
from mn_tools.bench.report import heading, human_seconds

GROUPS = {True: "the same training", False: "another training: compare the accuracy"}
"""What the choices that are exact, and the others, compute."""
COMPUTING, COMMUNICATING = "forward and backward pass", "the rest of the step"

_BAR = 40


def recommendations(advice: Advice) -> tuple[Estimate, Estimate]:
    """Return the best choice that does not change the training, and the best one of all."""
    rehearsed = [each for each in advice.estimates if each.rehearsed is not None]
    exact, overall = (best(rehearsed, advice.order, exact=exact) for exact in (True, False))
    if not overall.choice.is_exact:
        # The one that changes the training least of the fastest ones may not be clearly faster than the exact one.
        faster = [each for each in rehearsed if each.seconds * AS_FAST < exact.seconds]
        overall = best(faster, advice.order, exact=False)
    return exact, overall


def shown(advice: Advice, exact: bool) -> list[Estimate]:
    """Return the estimates to show, the fastest first: of those that are not exact, one communicator of each."""
    group = sorted((each for each in advice.estimates if each.choice.is_exact == exact), key=lambda each: each.seconds)
    named = set(recommendations(advice))
    found: dict[str, Estimate] = {}
    for each in group:
        key = f"{each.choice.strategy} {each.choice}" if exact else str(each.choice)
        if key not in found or each in named:
            found[key] = each
    return sorted(found.values(), key=lambda each: each.seconds)


def advice_to_lines(advice: Advice) -> Iterator[str]:
    """Yield the lines of the report."""
    yield from heading(advice.machines, advice.notes)
    arrays = advice.arrays
    megabytes = f"{arrays.nbytes / 1e6:.3g} MB in {len(arrays.shapes)} arrays"
    yield f"{arrays.name}: {megabytes}; forward and backward pass: {human_seconds(advice.compute)}"
    if advice.measured_share < 1:
        yield f"note: {advice.measured_share:.0%} of it was measured, and the times multiplied: a step takes long here"
    groups = {exact: shown(advice, exact) for exact in GROUPS}
    longest = max(each.seconds for group in groups.values() for each in group)
    for exact, title in GROUPS.items():
        yield ""
        yield f"{title:52}{'one step':>9}"
        for each in groups[exact]:
            about = "~" if each.rehearsed is None else ""
            time = about + human_seconds(each.seconds)
            bar = _bar(each.seconds, advice.compute, longest)
            yield f"  {each.choice.strategy:16}{each.choice!s:34}{time:>9}  {bar}"
    yield ""
    yield f"█ {COMPUTING}, ▒ {COMMUNICATING}; ~ computed from its parts, the others from whole steps"
    for name, reason in advice.refusals.items():
        yield f"cannot run here: {name}: {reason}"
    yield f"measured in {advice.seconds:.0f} s"
    yield ""
    yield from _conclusion(*recommendations(advice))


def advice_to_json(advice: Advice) -> dict[str, Any]:
    """Return the recommendation as an object for ``json``; times are in seconds."""
    exact, overall = recommendations(advice)
    return {
        "machines": advice.machines.figures(),
        "model": advice.arrays.name,
        "arrays": len(advice.arrays.shapes),
        "bytes": advice.arrays.nbytes,
        "compute_seconds": advice.compute,
        "measured_share": advice.measured_share,
        "choices": [_row(each) for each in advice.estimates],
        "recommended": {"same_training": _row(exact), "any": _row(overall)},
        "refusals": advice.refusals,
        "notes": advice.notes,
        "seconds": advice.seconds,
    }


def _row(estimate: Estimate) -> dict[str, Any]:
    choice = estimate.choice
    return {
        "communicator": choice.strategy,
        "when": str(choice),
        "same_training": choice.is_exact,
        "step_seconds": estimate.seconds,
        "from": "parts" if estimate.rehearsed is None else "whole steps",
        "caveat": choice.caveat,
        "page": choice.page,
    }


def _bar(seconds: float, compute: float, longest: float) -> str:
    length = round(seconds / longest * _BAR)
    solid = min(length, round(compute / longest * _BAR))
    return "█" * solid + "▒" * (length - solid)


def _conclusion(exact: Estimate, overall: Estimate) -> Iterator[str]:
    yield f"Choose this; it does not change the training ({human_seconds(exact.seconds)} a step):"
    yield from _code(exact.choice)
    if overall.choice.is_exact:
        yield "Nothing that changes the training is clearly faster."
        return
    times = exact.seconds / overall.seconds
    yield f"Or this, {times:.1f} times as fast ({human_seconds(overall.seconds)} a step):"
    yield from _code(overall.choice)
    yield f"But it {overall.choice.caveat}. Read {overall.choice.page}, and compare the accuracy."


def _code(choice: Choice) -> Sequence[str]:
    return [
        f'    comm = chainermn.create_communicator("{choice.strategy}")',
        f"    optimizer = MultiNodeOptimizer(optimizer, comm, when={choice})",
    ]
