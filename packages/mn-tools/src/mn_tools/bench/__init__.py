"""``python -m mn_comm bench``: bandwidth and latency of each communicator, on the machines at hand.

::

    mpiexec -n 4 python -m mn_comm bench
    python -m mn_comm bench --ranks 4

The second form starts ``mpiexec -n 4`` itself, with the one beside the interpreter if there is one. Alone and without
``--ranks`` it only says how it is to be started, and exits with 2.

What is measured is what a training step waits for: ``multi_node_mean_grad`` of float32 gradients that lie in arrays of
their own, packing and the check that all ranks agree included. Beside it stands one ``MPI_Allreduce`` of as many bytes,
as it comes: not packed, not checked, not divided. Before anything is timed each communicator's result is compared with
the mean; a wrong one is said so, and makes the exit status 1.

All contestants run in turn, round after round, so that what else the machines do meets all alike. The time of a round
is that of the slowest rank, the time in the table the median of the rounds. The columns:

``time``
    Of one averaging.
``algbw``
    Algorithm bandwidth: the bytes of one rank's gradients, divided by the time.
``busbw``
    Bus bandwidth: ``algbw`` times 2(n-1)/n on n ranks, the definition of nccl-tests for an all-reduce
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). It does not depend on the number of ranks,
    and can be compared with what a network card or a link is said to do.
``/ MPI``
    The time, divided by that of ``MPI_Allreduce``; below 1 is faster.

The last line names the communicator to choose for the largest size: among those within 10 % of the fastest, the one
that stands first in ``hierarchical`` (which scripts get unless they say otherwise), ``two_dimensional``,
``pure_nccl``, ``flat``, ``single_node``, ``non_cuda_aware``, ``naive``. ``dummy`` is measured, as the cost of packing,
and never named.

Communicators that cannot run here are listed, each with the reason. A warning says where ranks outnumber the cores
that they may use, since all figures are of little worth then.

Options:

``--sizes 8,4K,64M``
    Bytes of one rank's gradients, with K, M and G for powers of 1024; multiples of 4. By default powers of 8 from 8 B,
    up to ``--max-bytes``, and that.
``--max-bytes 64M``
    The largest of the default sizes. Each rank needs up to ten times as much memory.
``--strategies flat,hierarchical``
    Which communicators; by default all.
``--rounds 20``
    How many rounds at most; fewer, but at least 3, where the rounds of one size would take longer than 10 seconds.
``--arrays 1``
    Into how many arrays the bytes are cut, as the gradients of a model are: ``naive`` averages them one by one.
``--device``
    Average CuPy arrays, each rank on the GPU of its number among the ranks of its node, modulo the GPUs that it sees.
    ``MPI_Allreduce`` still runs on host memory.
``--json [FILE]``
    Write the figures as one JSON object: to FILE beside the table, or to the standard output in place of it.
``--plot FILE.png``
    Draw time and bus bandwidth over size, as PNG, PDF or SVG. Needs matplotlib: ``pip install 'mn-tools[plot]'``.
``--ranks N``
    Start ``mpiexec -n N``.

A wrong argument is one message from rank 0, and the exit status 2 on every rank.
"""

from mn_tools.bench.command import main

__all__ = ["main"]
