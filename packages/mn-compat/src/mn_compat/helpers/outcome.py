"""Carries an exception from the thread in which it was raised to the one that waits for a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Failure:
    """Represents a failure in place of a result.

    Args:
        error: The exception.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def of(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or its failure."""
    try:
        return function()
    except Exception as error:
        return Failure(error)


def result(outcome: Any) -> Any:
    """Return a result; raise the exception of a failure."""
    if isinstance(outcome, Failure):
        raise outcome.error
    return outcome


def then(outcome: Any, function: Callable[[Any], Any]) -> Any:
    """Return the results of a function for each item of an outcome, or the failure that the outcome is."""
    return outcome if isinstance(outcome, Failure) else [function(item) for item in outcome]


def received(batch_and_state: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return a batch, and the iterator's state after it; raise the failure if there is no batch."""
    batch, state = batch_and_state
    return result(batch), state
