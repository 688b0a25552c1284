"""``python -m mn_comm bench``: how to train a model on your machines, or how fast each communicator is there.

::

    mpiexec -n 4 python -m mn_comm bench --model resnet50 --compute 180ms
    mpiexec -n 4 python -m mn_comm bench
    python -m mn_comm bench --ranks 4

The last form starts ``mpiexec -n 4`` itself, with the ``mpiexec`` in the interpreter's folder if there is one. With a
single process and without ``--ranks``, the command only prints how to start it, and exits with status 2.

With ``--model``, it recommends a communicator, ``when=`` and ``send=``. In about a minute, it measures the averages of
the model's arrays with each communicator and each compression, alone and during a computation, and computes from these
how long a step would take with each choice. Then it takes whole steps with the leading choices and with local steps, in
turn: computation of the given length, averages as ``MultiNodeOptimizer`` makes them, and an update of plain gradient
descent. A time is the median of the rounds, each of which counts on its slowest rank. If a step takes too long
for that, a part of the model and of the computation is measured, and the times are multiplied.

Choices that do not change what is computed are told apart from those that do. Among choices that differ by less than
10 %, it recommends the one that changes the training least: exact ones first, then ``Int8``, ``OneStepLate``,
``PowerSGD``, ``LocalSGD(4)``, ``OneBit``, ``LocalSGD(16)``, ``TopK``, ``DiLoCo(32)``.

``--model resnet50``
    The model: ``mlp`` (7 MB), ``resnet50`` (102 MB) or ``transformer`` (an encoder of 50 MB); or
    ``package.module:function``, which returns an object with ``namedparams()``, such as a model of Chainer; or a file:
    an ``.npz`` that Chainer's ``save_npz(file, model)`` has written, or a text with a shape on each line, such as
    ``64x3x7x7``.
``--compute 180ms``
    How long the forward and backward pass of one mini-batch takes while all processes run; or
    ``package.module:function``, a function that is called with the model, and runs them.
``--seconds 45s``
    How long the measurement may take, without the start of the processes.

Without ``--model``, it measures the communication of a training step: ``multi_node_mean_grad`` of float32 gradients in
separate arrays, including packing and the check that all ranks agree. For comparison, it measures one plain
``MPI_Allreduce`` of the same number of bytes, without packing, check and division. Before the timing begins, each
communicator's result is compared with the mean; a wrong result is reported, and makes the exit status 1.

All communicators run in turn, round after round, so that other programs on the machines affect all of them equally. The
time of a round is that of the slowest rank; the time in the table is the median of the rounds. The columns are:

``time``
    Of one averaging.
``algbw``
    Algorithm bandwidth: the bytes of one rank's gradients, divided by the time.
``busbw``
    Bus bandwidth: ``algbw`` times 2(n-1)/n on n ranks, the definition of nccl-tests for an all-reduce
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). It does not depend on the number of ranks,
    and can be compared with the nominal bandwidth of a network card or a link.
``/ MPI``
    The time, divided by that of ``MPI_Allreduce``; below 1 is faster.

The last line recommends a communicator for the largest size: among those within 10 % of the fastest, the first one in
the order ``hierarchical`` (the default), ``two_dimensional``, ``pure_nccl``, ``flat``, ``single_node``,
``non_cuda_aware``, ``naive``. ``dummy`` is measured as the cost of packing, but never recommended.

Communicators that cannot run here are listed, each with the reason. A warning is printed if there are more ranks than
cores, because the results are not meaningful then.

Options:

``--sizes 8,4K,64M``
    Bytes of one rank's gradients, with K, M and G for powers of 1024; multiples of 4. By default, powers of 8 from 8 B
    up to ``--max-bytes``, and ``--max-bytes`` itself.
``--max-bytes 64M``
    The largest of the default sizes. Each rank needs up to ten times as much memory.
``--strategies flat,hierarchical``
    Which communicators; by default all.
``--rounds 20``
    The maximum number of rounds; fewer, but at least 3, if the rounds of one size would take longer than 10 seconds.
``--arrays 1``
    Into how many arrays the bytes are divided, like the gradients of a model: ``naive`` averages them one by one.
``--device``
    Average CuPy arrays. Each rank uses the GPU whose index is its ``intra_rank``, modulo the number of visible GPUs.
    ``MPI_Allreduce`` still runs on host memory.
``--json [FILE]``
    With or without ``--model``: write the results as one JSON object, to FILE in addition to the table, or to standard
    output in place of the table.
``--plot FILE.png``
    Draw the expected steps, or time and bus bandwidth over size, as PNG, PDF or SVG. Needs matplotlib:
    ``pip install 'mn-tools[plot]'``.
``--ranks N``
    Start ``mpiexec -n N``.

For a wrong argument, rank 0 prints one message, and the exit status is 2 on every rank.
"""

from mn_tools.bench.command import main

__all__ = ["main"]
