"""What can be chosen for a training, how long a step is expected to take with it, and what is recommended.

All of this is arithmetic: :mod:`mn_tools.bench.rehearsal` measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mn_compress import Int8, OneBit, PowerSGD, TopK
from mn_compress.base import Compression
from mn_tools.bench.measure import preferred

AFTER, DURING, LATE, LOCAL, DILOCO = "AfterBackward", "DuringBackward", "OneStepLate", "LocalSGD", "DiLoCo"

SENDS: dict[str, Compression] = {
    "Int8()": Int8(),
    "PowerSGD()": PowerSGD(start_iter=0),  # steps at the beginning of a training are not what is measured
    "OneBit()": OneBit(),
    "TopK(0.01)": TopK(0.01),
}
"""Compressions, as a script writes them."""

# What is expected to take longer than this many times the fastest is not rehearsed.
_LEADING = 1.6

# What changes the training least comes first, by the accuracies in docs/compression.md and docs/local-steps.md.
_CHANGES: dict[str, tuple[str, str]] = {
    "": ("", "docs/performance.md"),
    "Int8()": ("adds a little rounding noise to every step", "docs/compression.md"),
    LATE: ("applies each gradient one step late; the learning rate may have to be lower", "docs/performance.md"),
    "PowerSGD()": ("applies part of each gradient later; the first 1,000 steps are exact", "docs/compression.md"),
    "LocalSGD(4)": ("lets the processes' parameters differ for 4 steps", "docs/local-steps.md"),
    "OneBit()": ("applies part of each gradient later; try exact steps at the beginning", "docs/compression.md"),
    "LocalSGD(16)": ("lets the processes' parameters differ for 16 steps", "docs/local-steps.md"),
    "TopK(0.01)": ("applies most of each gradient about 100 steps later", "docs/compression.md"),
    "DiLoCo(32)": (
        "lets the processes' parameters differ for 32 steps, and has a second optimizer",
        "docs/local-steps.md",
    ),
}


@dataclass(frozen=True)
class Choice:
    """A way to train.

    Attributes:
        strategy: The name of the communicator.
        when: The class that is passed as ``when``.
        send: The compression; empty to send exact gradients.
        steps: The number of steps between two meetings; 0 if gradients are averaged in every step.
    """

    strategy: str
    when: str = AFTER
    send: str = ""
    steps: int = 0

    def __str__(self) -> str:
        """Return what a script passes as ``when``."""
        return f"{self.when}({self.steps or (f'send={self.send}' if self.send else '')})"

    @property
    def is_exact(self) -> bool:
        """Whether training has the same result as with ``AfterBackward()``."""
        return self.when in (AFTER, DURING) and not self.send

    @property
    def caveat(self) -> str:
        """How it changes the training; empty if it does not."""
        return _CHANGES[self._change][0]

    @property
    def page(self) -> str:
        """The page to read before it is used."""
        return _CHANGES[self._change][1]

    @property
    def harm(self) -> int:
        """Its place in the order of how much it changes the training; 0 if it does not."""
        return list(_CHANGES).index(self._change)

    @property
    def _change(self) -> str:
        return "" if self.is_exact else self.send or (LATE if self.when == LATE else str(self))


@dataclass(frozen=True)
class Parts:
    """The measured parts of a step, in seconds.

    Attributes:
        forward: The forward pass, on the slowest rank.
        backward: The backward pass, on the slowest rank.
        update: The optimizer's step.
        alone: Forward pass, backward pass and update of a rank that waits for no other one: the mean of the ranks.
        meeting: What local steps compute at a meeting, besides the average.
        averages: The average after a backward pass, by strategy and compression.
        background: The average in a background thread, by strategy and compression, as far as it was measured.
        hidden: Which part of such an average disappears during a computation that is long enough: 1 if the average
            needs no core, 0 if it only takes the core away from the computation. By strategy and compression, as far
            as it was measured.
        last: The last bucket's share of the gradients.
    """

    forward: float
    backward: float
    update: float
    alone: float
    meeting: float
    averages: Mapping[tuple[str, str], float]
    background: Mapping[tuple[str, str], float]
    hidden: Mapping[tuple[str, str], float]
    last: float

    @property
    def compute(self) -> float:
        """The forward and the backward pass."""
        return self.forward + self.backward

    def average_of(self, choice: Choice) -> float:
        """Return the seconds of the average of a choice, if nothing is computed meanwhile."""
        key = choice.strategy, choice.send
        in_foreground = self.averages[key]
        return in_foreground if choice.when not in (DURING, LATE) else self.background.get(key, in_foreground)

    def hidden_of(self, choice: Choice) -> float:
        """Return which part of the average of a choice can be hidden: as measured, or as with another strategy."""
        like = (part for (_, send), part in self.hidden.items() if send == choice.send)
        return self.hidden.get((choice.strategy, choice.send), next(like, 0.0))


@dataclass(frozen=True)
class Estimate:
    """How long a step takes with a choice.

    Attributes:
        choice: The choice.
        expected: The seconds of a step that were computed from its parts.
        rehearsed: The seconds that whole steps took; ``None`` if it was not among the leading ones.
    """

    choice: Choice
    expected: float
    rehearsed: float | None = None

    @property
    def seconds(self) -> float:
        """The best estimate."""
        return self.expected if self.rehearsed is None else self.rehearsed


def menu(strategies: Sequence[str], compressing: Sequence[str]) -> list[Choice]:
    """Return what can be chosen.

    Args:
        strategies: The names of communicators for exact averages.
        compressing: The names of communicators for everything else; the first one for local steps.
    """
    choices = [Choice(strategy, when) for strategy in strategies for when in (AFTER, DURING)]
    for strategy in compressing:
        choices.append(Choice(strategy, LATE))
        choices += [Choice(strategy, when, send) for send in SENDS for when in (AFTER, DURING)]
    local = (LOCAL, 4), (LOCAL, 16), (DILOCO, 32)
    return choices + [Choice(strategy, when, steps=steps) for strategy in compressing[:1] for when, steps in local]


def expected(choice: Choice, parts: Parts) -> float:
    """Return the seconds of a step.

    - ``AfterBackward``: forward + backward + average + update.
    - ``DuringBackward``: the same, less what is hidden. Gradients are sent in buckets of 4 MiB, and the last bucket is
      complete only when the backward pass ends; so at most the backward pass, and at most the average of the other
      buckets, is hidden, and only the part of it that does not need the cores.
    - ``OneStepLate``: the same, and the average can be hidden behind the whole step.
    - ``LocalSGD`` and ``DiLoCo`` with H steps: a step of a rank alone + (average + meeting) / H. No rank waits for
      another one between two meetings.
    """
    average = parts.average_of(choice)
    if choice.steps:
        return parts.alone + (average + parts.meeting) / choice.steps
    one_after_the_other = parts.compute + average + parts.update
    if choice.when == DURING:
        return one_after_the_other - parts.hidden_of(choice) * min(parts.backward, average * (1 - parts.last))
    if choice.when == LATE:
        return one_after_the_other - parts.hidden_of(choice) * min(parts.compute + parts.update, average)
    return one_after_the_other


def finalists(estimates: Iterable[Estimate], default: str, most: int) -> list[Choice]:
    """Return the choices to rehearse: the leading ones of those that are exact, and the leading ones of the others.

    Args:
        estimates: The expected times.
        default: The communicator that is always among them, with both ways to average exactly.
        most: How many of each.
    """
    ranked = sorted(estimates, key=lambda each: each.expected)
    chosen = [each.choice for each in ranked if each.choice.is_exact and each.choice.strategy == default]
    for is_exact in (True, False):
        group = [each for each in ranked if each.choice.is_exact == is_exact]
        leading = [each.choice for each in group[:most] if each.expected <= group[0].expected * _LEADING]
        chosen += [choice for choice in leading if choice not in chosen]
    return chosen


def best(estimates: Iterable[Estimate], order: Sequence[str], exact: bool) -> Estimate:
    """Return what to choose: of those that are about as fast as the fastest, the one that changes the training least.

    Args:
        estimates: Those that were rehearsed.
        order: The names of communicators, in the order of preference.
        exact: Whether to choose only from what does not change the training.
    """
    group = [each for each in estimates if each.choice.is_exact or not exact]

    def preference(each: Estimate) -> tuple[int, int, float]:
        return each.choice.harm, order.index(each.choice.strategy), each.seconds

    return preferred(group, lambda each: each.seconds, preference)
