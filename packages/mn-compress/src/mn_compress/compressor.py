"""The compression of a gradient reducer: the exchange of each bucket, the part that it has omitted, and statistics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis.placement import array_module, at_rest, is_device_array
from mn_comm.collectives.transport import Transport
from mn_comm.gradients.compression import CompressionReport, CompressionScheme
from mn_comm.gradients.parts import Exchanged, Spec
from mn_comm.ranks import agreement
from mn_compress.exchange import Exchange, Piece, Portion

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

_Array = np.ndarray[Any, Any]
_HEADER = "header"


@dataclass(eq=False)
class _Known:
    """The data that is kept for one layout of gradients.

    Attributes:
        key: Distinguishes the layout from others, in this run and the next.
        names: The names of its parameters.
        order: The names in the order in which gradients are sent.
        step: How many steps have used it.
        exchanges: The exchanges of the buckets, by the first element of each and the number of ranks: of two sets of
            buckets for the same gradients, one may have been made when memory could not be shared any more.
        saved: The arrays of exchanges that were loaded, but have not been used yet.
        unscaled: The names of those that stay as they are when the loss scale changes.
    """

    key: str
    names: frozenset[str]
    order: list[str]
    step: int = 0
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    saved: dict[str, dict[str, _Array]] = field(default_factory=dict)
    unscaled: frozenset[str] = frozenset()


class Compressor:
    """Averages the exchanged parts of buckets, less exactly and with fewer bytes.

    Changes that a step makes to the kept data take effect only when they are committed, on all ranks together; an
    abandoned reduction has no effect.

    Args:
        compression: The compression.
        exchange: Its method that returns an object that averages a portion.

    Attributes:
        scale: The factor of the gradients, and so of the part that was omitted.
    """

    def __init__(self, compression: CompressionScheme, exchange: Callable[[Portion], Exchange]) -> None:
        self.compression = compression
        self._exchange_of = exchange
        self.scale = 1.0
        self._known: dict[int, _Known] = {}
        # For each exchange, which may run in either of two threads: the bytes sent, and the bytes without compression.
        self._done: list[tuple[Exchange, int, float]] = []
        self._last = (0, 0.0)
        self._loaded: list[_Known] = []
        self._has_warned = False

    def adopt(
        self, ranks: Ranks, number: int, specs: Sequence[Spec], order: Sequence[str], form: tuple[Any, ...]
    ) -> None:
        """Prepare for the buckets of a new layout; collective.

        Loaded data is used if it matches on all ranks. Data that was kept for the same parameters in another layout is
        discarded, with a warning.

        Args:
            ranks: All ranks.
            number: The number of the layout.
            specs: The names, shapes and dtypes of its gradients.
            order: The names of parameters in the order in which gradients are sent.
            form: What else decides which elements this rank exchanges with which ranks.
        """
        signature = [(name, shape, dtype.name) for name, shape, dtype in specs]
        key = f"{ranks.rank}/{ranks.size}: {agreement.digest((signature, form))}"
        known = _Known(key, frozenset(name for name, *_ in signature), list(order))
        fitting = next((each for each in self._loaded if each.key == key), None)
        others = [each for each in self._known.values() if each.names & known.names]
        if not ranks.any(fitting is None) and fitting is not None and not ranks.differ(fitting.step):
            known.step, known.saved, known.unscaled = fitting.step, fitting.saved, fitting.unscaled
            self._loaded.remove(fitting)
        elif ranks.any(any(each.step for each in others) or any(each.names & known.names for each in self._loaded)):
            self._warn(ranks)
            self._loaded = [each for each in self._loaded if not each.names & known.names]
        for each in others:
            each.exchanges.clear()
            each.saved.clear()
        self._known[number] = known

    def forget(self, layout: int) -> None:
        """Discard the data of a layout that is not used any more."""
        self._known.pop(layout, None)

    def average(self, transport: Transport, portion: Any, what: Exchanged) -> None:
        """Overwrite a part of a bucket with its mean over some ranks; collective.

        Args:
            transport: The ranks, and the transport between them.
            portion: The part: one-dimensional, of floats; if it is on a device, on the current one. Not every
                compression accepts arrays on devices.
            what: Identifies the part and its bucket.
        """
        ranks = transport.ranks
        if ranks.size == 1:
            return
        known = self._known[what.layout]
        exchange = self._exchange(known, ranks, portion, what)
        with np.errstate(all="ignore"):  # NaN and infinities come from the gradients themselves
            exchange.average(transport, portion, known.step)
        # Half precision on a device is packed as float32.
        itemsize = what.specs[what.parts[0].member][2].itemsize
        plain = 2 * (ranks.size - 1) / ranks.size * portion.size * itemsize
        self._done.append((exchange, transport.sent, plain))

    def commit(self, layout: int) -> None:
        """Keep the changes of the last step; must be called on all ranks.

        Args:
            layout: The number of the layout whose buckets were averaged.
        """
        for exchange, *_ in self._done:
            exchange.memory.commit()
        if layout in self._known:
            self._known[layout].step += 1
        self._last = sum(sent for _, sent, _ in self._done), sum(plain for *_, plain in self._done)
        self.roll_back()

    def roll_back(self) -> None:
        """Discard the changes of a step that was abandoned."""
        self._done.clear()

    def use_scale(self, scale: float) -> None:
        """Use another factor for gradients from now on."""
        change, self.scale = np.float32(scale / self.scale), scale
        for known in (*self._known.values(), *self._loaded):
            kept = [(arrays, known.unscaled) for arrays in known.saved.values()]
            kept += [(each.memory.now, each.memory.unscaled) for each in known.exchanges.values()]
            for array in (array for arrays, unscaled in kept for name, array in arrays.items() if name not in unscaled):
                with at_rest(array):
                    array *= change

    def report(self) -> CompressionReport:
        """Return the statistics of the last step on this rank; not collective."""
        sent, plain = self._last
        memories = [each.memory for known in list(self._known.values()) for each in list(known.exchanges.values())]
        square = sum(_square(memory.now[name]) for memory in memories for name in memory.omitted)
        return CompressionReport(sent, sent / plain if plain else 1.0, square**0.5 / self.scale)

    def state(self) -> dict[str, _Array]:
        """Return a copy of the data that this rank keeps; empty if there is none."""
        arrays: list[_Array] = []
        header = []
        for known in [*self._known.values(), *self._loaded]:
            held = known.saved | {name: each.memory.now for name, each in known.exchanges.items()}
            arrays += [_copy(array) for memory in held.values() for array in memory.values()]
            told = {"key": known.key, "names": sorted(known.names), "order": known.order, "step": known.step}
            unscaled = known.unscaled.union(*(each.memory.unscaled for each in known.exchanges.values()))
            names = [(portion, name) for portion, memory in held.items() for name in memory]
            header.append(told | {"unscaled": sorted(unscaled), "arrays": names})
        if not header:
            return {}
        text = json.dumps({"compression": repr(self.compression), "scale": self.scale, "layouts": header})
        header_bytes = np.frombuffer(text.encode(), np.uint8).copy()
        return {_HEADER: header_bytes, **{str(i): array for i, array in enumerate(arrays)}}

    def load(self, state: Mapping[str, _Array]) -> None:
        """Continue with the result of :meth:`state`, discarding all other data; the reducer must discard its layouts.

        Args:
            state: The arrays by name; empty to start without kept data.
        """
        self._known.clear()
        self._loaded.clear()
        self._has_warned = False
        self.scale = 1.0
        self.roll_back()
        if _HEADER not in state:
            return
        header = json.loads(np.asarray(state[_HEADER]).tobytes())
        self.scale = header["scale"]
        fits = header["compression"] == repr(self.compression)
        numbers = iter(range(len(state)))
        for each in header["layouts"]:
            known = _Known(each["key"] if fits else "", frozenset(each["names"]), each["order"], each["step"])
            known.unscaled = frozenset(each.get("unscaled", ()))
            for portion, name in each["arrays"]:
                known.saved.setdefault(portion, {})[name] = np.array(state[str(next(numbers))])
            self._loaded.append(known)

    def loaded_order(self, names: frozenset[str]) -> list[str] | None:
        """Return the order in which gradients of these parameters were sent when the loaded data was saved."""
        return next((each.order for each in self._loaded if each.order and each.names == names), None)

    def _warn(self, ranks: Ranks) -> None:
        has_warned, self._has_warned = self._has_warned, True
        if not ranks.any(has_warned):
            agreement.warn(
                ranks,
                "compression: what was not sent yet is lost, and error feedback starts again: the layout of the "
                "gradients, the number of ranks, or the compression is not what it was before",
            )

    def _exchange(self, known: _Known, ranks: Ranks, portion: Any, what: Exchanged) -> Exchange:
        member, within, *_ = what.parts[0]
        name = f"{member}+{within.start if isinstance(within, slice) else 0} of {ranks.size}"
        found = known.exchanges.get(name)
        if found is None:
            pieces = _pieces(what, portion.size)
            xp = array_module(portion)
            found = self._exchange_of(Portion(portion.size, pieces, ranks.rank, ranks.size, xp))
            for key, array in known.saved.pop(name, {}).items():
                if found.memory.now[key].shape == array.shape:  # else memory sharing has changed
                    found.memory.now[key][...] = xp.asarray(array)
            known.exchanges[name] = found
        return found


def _square(error: Any) -> float:
    """Return the square of a norm."""
    if not is_device_array(error):
        return float(np.vdot(error, error))
    with error.device:
        return float(array_module(error).vdot(error, error))


def _copy(array: Any) -> _Array:
    """Return a copy in host memory."""
    with at_rest(array):
        copy: _Array = array.get() if is_device_array(array) else array.copy()
    return copy


def _pieces(what: Exchanged, length: int) -> list[Piece]:
    """Return the pieces of gradients that a part of a bucket consists of."""
    pieces = []
    for part in what.parts:
        begin, end = max(part.begin, what.begin), min(part.end, what.begin + length)
        if begin < end:
            start = (part.within.start if isinstance(part.within, slice) else 0) + begin - part.begin
            pieces.append(Piece(begin - what.begin, end - what.begin, what.specs[part.member][1], start))
    return pieces
