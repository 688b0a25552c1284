"""A class of communicators for each strategy in the table: ``TwoDimensionalCommunicator`` for ``two_dimensional``."""

from __future__ import annotations

from mn_comm.communicator import Communicator
from mn_comm.gradients.strategies import STRATEGIES, Strategy

_made: dict[type[Strategy], type[Communicator]] = {}


def class_of(strategy: type[Strategy]) -> type[Communicator]:
    """Return the class of the communicators that average by a strategy, which gives the class its documentation."""
    if strategy not in _made:
        doc = f"``{strategy.name}``: {(strategy.__doc__ or 'a strategy of another package.').strip()}"
        content = {"strategy": strategy.name, "__doc__": doc, "__module__": __name__}
        _made[strategy] = type(_class_name(strategy), (Communicator,), content)
    return _made[strategy]


def _class_name(strategy: type[Strategy]) -> str:
    return "".join(word.capitalize() for word in strategy.name.split("_")) + "Communicator"


def __getattr__(name: str) -> type[Communicator]:
    for strategy in STRATEGIES.values():
        if name == _class_name(strategy):
            return class_of(strategy)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *map(_class_name, STRATEGIES.values())])
