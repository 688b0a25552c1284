"""The end: rank 0 gathers the spans of all ranks, without waiting forever for a missing one.

When a rank's program ends, it sends a hello message to rank 0. At its own end, rank 0 compares clocks with each rank
that has sent one, and then lets it send its spans. So no rank sends much data before rank 0 is ready to receive it, and
rank 0 does not wait for a rank that has not shown that it is alive.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm.building_blocks import Ranks, at_exit
from mn_tools.timeline import clock, trace
from mn_tools.timeline.clock import Sample
from mn_tools.timeline.record import Recorder
from mn_tools.timeline.trace import Part

_PATIENCE_SECONDS = 10.0
_CLOCK_SECONDS = 2.0
_PAUSE_SECONDS = 1e-3


class Collector:
    """Adds the spans of this rank to the trace.

    Args:
        recorder: This rank's spans.
        file: The file for the trace.

    Attributes:
        is_aligned: Whether clocks have been compared; the same on all ranks.
    """

    def __init__(self, recorder: Recorder, file: str) -> None:
        self._recorder = recorder
        self._file = file
        self._rank = MPI.COMM_WORLD.rank
        self._size = MPI.COMM_WORLD.size
        self._host = MPI.Get_processor_name()
        self._mpi_comm: Any = MPI.COMM_NULL
        self._samples: list[Sample] = []
        self._pid = os.getpid()
        self.is_aligned = False
        self._remove_earlier()
        at_exit(self.finish)  # after the tasks of background threads, whose workers are made later; before MPI ends

    def _remove_earlier(self) -> None:
        """Remove what an earlier job has left, which would be taken for a part of this one."""
        _remove(trace.part_file(self._file, self._rank))
        if self._rank == 0:
            of_this_job = {trace.part_file(self._file, rank) for rank in range(self._size)}
            for file in {self._file, *trace.part_files(self._file)} - of_this_job:
                _remove(file)

    def align(self, mpi_comm: MPI.Intracomm) -> None:
        """Compare the clocks of all ranks with that of rank 0; collective.

        Args:
            mpi_comm: All ranks, in the order of ``COMM_WORLD``.
        """
        self._mpi_comm = Ranks(mpi_comm).duplicate()
        self.is_aligned = True
        if self._rank:
            self._samples = clock.reply(self._mpi_comm, float("inf")) or []
            return
        self._samples = [Sample(time.perf_counter_ns(), 0, 0)]
        for other in range(1, self._size):
            clock.tell(self._mpi_comm, other, clock.measure(self._mpi_comm, other, float("inf")), float("inf"))

    def finish(self) -> None:
        """Send the spans to rank 0; on rank 0, write all spans that have arrived. Called when the program ends."""
        if self._pid != os.getpid():
            return
        # Set when an exception has ended the program; without mn-guard, which would have ended all ranks.
        has_failed = hasattr(sys, "last_type")
        can_talk = self.is_aligned and not has_failed and not MPI.Is_finalized()
        if self._rank == 0:
            parts = self._gather() if can_talk else []
            self._write([self._part(), *parts])
        elif not (can_talk and self._hand_over()):
            self._write_part()

    def _part(self) -> Part:
        kept = self._recorder
        return Part(
            rank=self._rank,
            host=self._host,
            events=list(kept.events),
            threads=dict(kept.threads),
            dropped=kept.dropped,
            full_at=kept.full_at,
            started=kept.started,
            samples=self._samples,
        )

    def _hand_over(self) -> bool:
        """Send the spans to rank 0, and return whether it has received them."""
        try:
            clock.send(self._mpi_comm, b"", 0, clock.HELLO, _soon())
            latest = clock.reply(self._mpi_comm, _PATIENCE_SECONDS)
            if latest is None:
                clock.send(self._mpi_comm, b"", 0, clock.GAVE_UP, _soon())
                return False
            self._samples += latest
            return self._send(self._part().to_bytes())
        except MPI.Exception:  # rank 0 is dead, and the MPI library reports it
            return False

    def _send(self, text: bytes) -> bool:
        content = MPI.Alloc_mem(len(text))
        content[:] = text
        is_sent = clock.send(self._mpi_comm, content, 0, clock.EVENTS, _soon())
        if is_sent:  # otherwise, rank 0 may still read it, even after the end of Python
            MPI.Free_mem(content)
        return is_sent

    def _gather(self) -> list[Part]:
        """Return the parts that other ranks have sent."""
        parts: list[Part] = []
        waiting = set(range(1, self._size))
        last = time.monotonic()
        while waiting and time.monotonic() - last < _PATIENCE_SECONDS:
            heard = {rank: is_over for rank in sorted(waiting) if (is_over := self._hear(rank, parts)) is not None}
            waiting -= {rank for rank, is_over in heard.items() if is_over}
            if heard:
                last = time.monotonic()
            else:
                time.sleep(_PAUSE_SECONDS)
        return parts

    def _hear(self, rank: int, parts: list[Part]) -> bool | None:
        """Answer a rank, or add its part; return whether that was all, and ``None`` if it has sent nothing."""
        status = MPI.Status()
        try:  # each rank by itself: if one is dead, the MPI library does not say what any of the others has sent
            if self._mpi_comm.Iprobe(rank, clock.HELLO):
                return not self._answer(rank)
            if self._mpi_comm.Iprobe(rank, clock.EVENTS, status):
                parts += self._receive(status)
                return True
        except MPI.Exception:  # it is dead, and the MPI library reports it
            return True
        return None

    def _answer(self, rank: int) -> bool:
        """Let a rank that has said hello send its spans, unless it has given up in the meantime."""
        clock.receive(self._mpi_comm, bytearray(), rank, clock.HELLO, _soon())
        if self._mpi_comm.Iprobe(rank, clock.GAVE_UP):
            clock.receive(self._mpi_comm, bytearray(), rank, clock.GAVE_UP, _soon())
            return False
        sample = clock.measure(self._mpi_comm, rank, _CLOCK_SECONDS)
        return sample is not None and clock.tell(self._mpi_comm, rank, sample, _CLOCK_SECONDS)

    def _receive(self, status: MPI.Status) -> list[Part]:
        content = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        if clock.receive(self._mpi_comm, content, status.source, clock.EVENTS, _soon()) is None:
            return []
        return [Part.from_bytes(content.tobytes())]

    def _write(self, parts: list[Part]) -> None:
        """Write the trace, with parts that exist as files."""
        files, missing = [], []
        for rank in sorted(set(range(self._size)) - {part.rank for part in parts}):
            file = trace.part_file(self._file, rank)
            try:
                parts.append(trace.load(file))
            except OSError:  # it does not exist, or not yet: then it stays
                missing.append(rank)
            else:
                files.append(file)
        notes = [f"missing: {', '.join(f'rank {rank}' for rank in missing)}"] if missing else []
        try:
            trace.write(self._file, parts, notes)
        except OSError as error:
            warnings.warn(f"the timeline could not be written: {error}", stacklevel=2)
            return
        for file in files:
            _remove(file)
        if missing:
            warnings.warn(f"the timeline {self._file} lacks some ranks; {notes[0]}", stacklevel=2)

    def _write_part(self) -> None:
        try:
            trace.write_part(self._file, self._part())
        except OSError as error:
            warnings.warn(f"rank {self._rank}'s part of the timeline could not be written: {error}", stacklevel=2)


def _soon() -> float:
    return time.monotonic() + _PATIENCE_SECONDS


def _remove(file: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(file)
