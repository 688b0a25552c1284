"""What averaging needs of a compression: the interface of the objects that the package mn-compress has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mn_comm.collectives.transport import Transport
from mn_comm.gradients.parts import Exchanged, Spec

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

_State = Mapping[str, np.ndarray[Any, Any]]


class CompressionReport(NamedTuple):
    """The effect of compression on one rank in the last step.

    Attributes:
        bytes_sent: How many bytes this rank sent to other nodes; on one node, to other ranks.
        ratio: This number, divided by the number that an exact all-reduce would have sent in the gradients' dtype.
        error_norm: The norm of the part of the gradients that this rank has not sent yet, of the elements that it
            exchanges; without the loss scale.
    """

    bytes_sent: int
    ratio: float
    error_norm: float


class CompressionScheme(Protocol):
    """A way to compress gradients: an immutable object with its settings, the same on every rank.

    Attributes:
        on_devices: Whether it can also average arrays on a device; otherwise, they are copied to host memory.
        is_launched: Whether, on a device, it only puts work on the current stream and never waits for it.
    """

    @property
    def on_devices(self) -> bool: ...  # noqa: D102
    @property
    def is_launched(self) -> bool: ...  # noqa: D102

    def compressor(self) -> Compressor:
        """Return an object that averages the gradients of one reducer."""


class Compressor(Protocol):
    """Averages the exchanged parts of buckets, less exactly and with fewer bytes.

    Changes that a step makes to the kept data take effect only when they are committed, on all ranks together.

    Attributes:
        compression: The compression.
        scale: The factor of the gradients, such as a loss scale.
    """

    scale: float

    @property
    def compression(self) -> CompressionScheme: ...  # noqa: D102

    def adopt(
        self, ranks: Ranks, number: int, specs: Sequence[Spec], order: Sequence[str], form: tuple[Any, ...]
    ) -> None:
        """Prepare for the buckets of a new layout with a number; collective.

        ``order`` has the names of parameters in the order in which gradients are sent, and ``form`` what else decides
        which elements this rank exchanges with which ranks.
        """

    def forget(self, layout: int) -> None:
        """Discard the data of a layout that is not used any more."""

    def average(self, transport: Transport, portion: Any, what: Exchanged) -> None:
        """Overwrite a part of a bucket with its mean over some ranks; collective."""

    def commit(self, layout: int) -> None:
        """Keep the changes of the last step; must be called on all ranks."""

    def roll_back(self) -> None:
        """Discard the changes of a step that was abandoned."""

    def use_scale(self, scale: float) -> None:
        """Use another factor for gradients from now on."""

    def report(self) -> CompressionReport:
        """Return the statistics of the last step on this rank; not collective."""

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return a copy of the data that this rank keeps; empty if there is none."""

    def load(self, state: _State) -> None:
        """Continue with the result of :meth:`state`, discarding all other data."""

    def loaded_order(self, names: frozenset[str]) -> list[str] | None:
        """Return the order in which gradients of these parameters were sent when the loaded data was saved."""
