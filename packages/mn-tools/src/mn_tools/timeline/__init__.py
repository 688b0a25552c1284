"""The timeline: what every rank did when, in one file that Perfetto shows.

::

    CHAINERMN_TIMELINE=trace.json mpiexec -n 4 python train.py

writes ``trace.json`` when the job ends, for https://ui.perfetto.dev or chrome://tracing. Each rank is a process of the
trace, named with its host, and each of its threads is a row: the main thread, and, where gradients are averaged in the
background, the communication thread. Open MPI hands a variable to other hosts only if it is told to, by ``mpiexec -x
CHAINERMN_TIMELINE``; what counts is what rank 0 has.

The spans of a training step:

``step``
    One ``update`` of the multi-node optimizer, numbered from 0.
``forward``, ``backward``
    The loss function that ``update`` was given, and the backward pass. A script that calls ``backward`` itself and then
    ``update()`` has them in the gap before the step.
``agree``
    The check that all ranks have the same gradients. The first rank to arrive waits here for the others.
``communicate``
    The gradients are averaged: bytes and strategy. With ``overlap`` or ``double_buffering`` it is in the communication
    thread, one for each bucket, with its number.
``pack``, ``launch``, ``wait``, ``unpack``
    There, in the main thread: a bucket's gradients are copied into its memory; it is given to the communication thread,
    to NCCL, or to the hook; the thread waits for a bucket that is still on its way; and its means are written to the
    gradients.
``update``
    The step of the actual optimizer.
``between steps``
    What lies between two of them: loading data, evaluation, and what else the script does.

Operations of the communicator, such as ``bcast_data``, ``allreduce_obj`` or ``send``, are spans by their name; and
:func:`mn_comm.span` adds those of a script. For arrays on a GPU, spans show when the host gives orders and waits, not
when the device works.

**Clocks.** All times are those of rank 0. Every rank's clock is compared with that of rank 0 when the first
communicator of all ranks is made, and again at the end: rank 0 asks for the time 20 times and believes the answer that
came back soonest, so that the error is at most half of that round trip (F. Cristian, "Probabilistic clock
synchronization", Distributed Computing 3, 1989). Between the two the difference is taken to change linearly. What the
error is stands in the trace under ``otherData``. Ranks that never had a communicator of all ranks are placed by the
wall clocks of their hosts, and marked so.

**The end.** Each rank keeps its spans in memory, 200,000 at most, some 60 MB; later ones are counted, and a mark in the
trace says so. When the program ends, ranks send them to rank 0 as MPI messages, so that no shared file system is
needed. Nobody waits for ever: rank 0 writes what it has when 10 seconds have brought nothing new, and names in the
trace the ranks that are missing. A rank that rank 0 does not answer, because it has ended or is busy for longer than 10
seconds, writes ``trace.json.rank3.part`` beside where the trace is to be. Rank 0 takes it in if it sees it; later,

::

    python -m mn_comm timeline trace.json

makes one trace of the file, if it is there, and all its parts. A rank that ends by an exception does not wait at all;
one that is killed leaves nothing.

If the file cannot be written, rank 0 warns, and training goes on. Without the variable nothing is recorded, no object
is made, and a step costs a few ``is None`` more.
"""

from mn_tools.timeline.record import Recorder
from mn_tools.timeline.start import join

__all__ = ["Recorder", "join"]
