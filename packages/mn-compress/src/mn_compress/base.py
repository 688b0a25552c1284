"""The base class of all compressions, and checks of their settings."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from mn_compress.compressor import Compressor
from mn_compress.exchange import Exchange, Portion


@dataclasses.dataclass(frozen=True)
class Compression(ABC):
    """A way to compress gradients: an immutable object with its settings, the same on every rank.

    Attributes:
        on_devices: Whether its exchanges can also average portions on a device, with CuPy as ``Portion.xp``. Otherwise,
            gradients on a device are copied to host memory and compressed there.
        is_launched: Whether such an exchange only puts work on the current stream and never waits for the device,
            because the lengths of its messages are known before.
    """

    on_devices: ClassVar[bool] = False
    is_launched: ClassVar[bool] = False

    @abstractmethod
    def exchange(self, portion: Portion) -> Exchange:
        """Return an object that averages such a portion; not collective.

        Args:
            portion: The description of the portion.
        """

    def compressor(self) -> Compressor:
        """Return an object that averages the gradients of one reducer, with what it keeps from step to step."""
        return Compressor(self, self.exchange)


def set_integer(settings: Compression, name: str, least: int, most: float = math.inf) -> None:
    """Make a setting an ``int``, so that equal settings also have the same ``repr``; raise unless it is an integer.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is too small or too large.
    """
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"expected an integer for {name}, got {type(value).__name__}: {value!r:.80}")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}")
    if value > most:
        raise ValueError(f"expected {name} of at most {most}, got {value}")
    object.__setattr__(settings, name, int(value))


def set_number(settings: Compression, name: str) -> None:
    """Make a setting a ``float``; raise ``TypeError`` unless it is a real number."""
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"expected a number for {name}, got {type(value).__name__}: {value!r:.80}")
    object.__setattr__(settings, name, float(value))
