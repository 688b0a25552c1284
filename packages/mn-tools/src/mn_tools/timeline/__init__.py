"""The timeline: what every rank did, and when, in one file for Perfetto.

::

    CHAINERMN_TIMELINE=trace.json mpiexec -n 4 python train.py

writes ``trace.json`` when the job ends, for https://ui.perfetto.dev or chrome://tracing. Each rank is a process of the
trace, named with its host, and each of its threads is a row: the main thread, and, where gradients are averaged in the
background, the communication thread. Open MPI passes a variable to other hosts only with ``mpiexec -x
CHAINERMN_TIMELINE``; only the value on rank 0 matters.

The spans of a training step:

``step``
    One ``update`` of the multi-node optimizer, numbered from 0.
``forward``, ``backward``
    The loss function that was passed to ``update``, and the backward pass. If a script calls ``backward`` itself and
    then ``update()``, they are in the gap before the step.
``agree``
    The check that all ranks have the same gradients. The first rank to arrive waits here for the others.
``communicate``
    The gradients are averaged; details are bytes and strategy. With ``DuringBackward`` or ``OneStepLate``, there
    is one span for each bucket, with its number, in the communication thread.
``pack``, ``launch``, ``wait``, ``unpack``
    With these, in the main thread: the gradients of a bucket are copied into its memory; the bucket is passed
    to the communication thread, to NCCL, or to the hook; the main thread waits for a bucket that is still being
    averaged; and its means are written to the gradients.
``update``
    The step of the actual optimizer.
``between steps``
    The time between two steps: loading data, evaluation, and everything else that the script does.

Operations of the communicator, such as ``bcast_data``, ``allreduce_obj`` or ``send``, have spans with their names, and
a script can add its own with :func:`mn_comm.span`. For arrays on a GPU, spans show when the host launches work and
waits, not when the device computes.

**Clocks.** All times are given in the clock of rank 0. Every rank's clock is compared with that of rank 0 when the
first communicator of all ranks is created, and again at the end: rank 0 asks for the time 20 times and uses the answer
with the shortest round trip, so that the error is at most half of that round trip (F. Cristian, "Probabilistic clock
synchronization", Distributed Computing 3, 1989). Between the two comparisons, the difference is assumed to change
linearly. The trace contains the error under ``otherData``. For ranks that never had a communicator of all ranks, the
wall clocks of their hosts are used, and the trace says so.

**The end.** Each rank keeps its spans in memory, at most 200,000, about 60 MB; later ones are counted, and a mark in
the trace says so. When the program ends, the ranks send their spans to rank 0 as MPI messages, so that no shared file
system is needed. No rank waits forever: if nothing new has arrived for 10 seconds, rank 0 writes the spans that it has,
and names the missing ranks in the trace. If rank 0 does not answer a rank, because it has ended or is busy for longer
than 10 seconds, that rank writes a file such as ``trace.json.rank3.part`` in the folder of the trace. Rank 0 includes
this file if it can see it. Later,

::

    python -m mn_comm timeline trace.json

merges the trace, if it exists, and all its parts. The trace and the parts of an earlier job are removed when the first
communicator is created.

Before the ranks send their spans, the tasks of background threads end, so their spans are included. With mn-guard, an
exception or an exit status other than 0 ends all ranks at once, and there is no trace; without it, a rank that ends
with an exception writes its part at once. A rank that is killed leaves no spans.

If the file cannot be written, rank 0 warns, and training continues. Without the variable, nothing is recorded, and a
step costs only a few additional ``is None`` checks.
"""

from mn_tools.timeline.record import Recorder
from mn_tools.timeline.start import join

__all__ = ["Recorder", "join"]
